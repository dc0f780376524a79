"""Check versions, machine and self-test, for a report that can be published.

The report names no person, machine or place: no paths, host names, addresses or environment
variables, and only the kind of an error.
"""

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from fastcomm import arrow_files, preparation
from fastcomm.errors import ClusterError, ConfigError, FastcommError, TraceFileError
from fastcomm.executors.processes import installed, versions
from fastcomm.files import place
from fastcomm.formats.store import reader
from fastcomm.formats.store.files import StoredFile, footer_sha256, listed, table_file
from fastcomm.formats.store.layout import (
    MANIFEST,
    Entry,
    Manifest,
    TableFile,
    read_manifest,
    table_name,
)
from fastcomm.result import TableResult
from fastcomm.trace.run_traces import SkippedRank
from fastcomm.units import counted, format_bytes
from fastcomm_kernels import _jit

CheckState = Literal["ok", "note", "bad"]
_NEEDED = ("click", "isal", "orjson", "adbc-driver-sqlite", "rich")
# Optional packages, and what they are needed for.
OPTIONAL = {
    "distributed": "--dask",
    "fsspec": "s3://, gs:// and other URLs",
    "universal-pathlib": "s3://, gs:// and other URLs",
    "xlsxwriter": "--xlsx",
    "networkx": "hta.CPGraph.to_networkx",
}
_CGROUP = Path("/sys/fs/cgroup")
# Expected numbers of the step that `run_metric_kernels` measures, in ns.
_EXPECTED = {
    "time_ns": 9000,
    "comm_union_ns": 2000,
    "comm_overlapped_ns": 1000,
    "exact_idle_ns": 6000,
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: a `bad` one must be fixed, a `note` need not."""

    name: str
    found: str
    state: CheckState = "ok"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(TableResult):
    """The results of all checks, in the order in which they depend on each other."""

    checks: tuple[Check, ...]

    @property
    def is_bad(self) -> bool:
        """Whether a check failed."""
        return any(check.state == "bad" for check in self.checks)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        checks = {one.name: {"found": one.found, "state": one.state} for one in self.checks}
        return {"checks": checks}

    def to_arrow(self) -> pa.Table:
        """Return a row per check, with a column per field."""
        return pa.Table.from_pylist([asdict(check) for check in self.checks])

    def figures(self) -> dict[str, str]:
        """Return the number of checks of each state, and the names of those that are bad."""
        states = Counter(check.state for check in self.checks)
        bad = [check.name for check in self.checks if check.state == "bad"]
        names = {"to mend": ", ".join(bad)} if bad else {}
        return {state: str(number) for state, number in states.items()} | names


def examine(
    dask: str | None = None, *, wait_s: float = 60, store: str | None = None
) -> Diagnosis:
    """Check the installation: versions, machine, cache, and a measurement with known numbers.

    Parameters
    ----------
    dask
        Address of a cluster to check; None checks none.
    wait_s
        Time to wait for its workers, s.
    store
        Path of a store to check; None checks none.

    """
    return Diagnosis(checks=tuple(_checks(dask, wait_s, store)))


def _checks(dask: str | None, wait_s: float, store: str | None) -> Iterator[Check]:
    for name, version in versions().items():
        yield Check(name, version, "bad" if version == "none" else "ok")
    yield from _packages()
    system = f"{platform.system()} {platform.machine()}, {platform.python_implementation()}"
    yield Check("system", system)
    yield _cores()
    yield _memory()
    yield _cache()
    yield _compiled()
    yield _self_test()
    if dask is not None:
        yield _dask(dask, wait_s)
    if store is not None:
        yield _store(place(store))


def _packages() -> Iterator[Check]:
    for name in _NEEDED:
        version = installed(name)
        yield Check(name, version or "none", "ok" if version else "note")
    for name, use in OPTIONAL.items():
        version = installed(name)
        yield Check(name, version or f"not installed: no {use}")


def _cores() -> Check:
    text = f"{os.cpu_count()}"
    if hasattr(os, "sched_getaffinity"):
        text += f", {len(os.sched_getaffinity(0))} may be used"
    quota = _read_parts(_CGROUP / "cpu.max")
    if len(quota) == 2 and all(part.isdecimal() for part in quota):  # noqa: PLR2004
        text += f", for {int(quota[0]) / int(quota[1]):.3g} of them time is granted"
    return Check("cores", text)


def _memory() -> Check:
    page = os.sysconf("SC_PAGE_SIZE")
    text = format_bytes(page * os.sysconf("SC_PHYS_PAGES"))
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        text += f", {format_bytes(page * os.sysconf('SC_AVPHYS_PAGES'))} free"
    limit = _read_parts(_CGROUP / "memory.max")
    if limit and limit[0].isdecimal():
        text += f", limited to {format_bytes(int(limit[0]))}"
    return Check("memory", text)


def _read_parts(path: Path) -> list[str]:
    """Return the words of a system file such as /proc/cpuinfo; empty if it is unreadable."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cache() -> Check:
    """Check that compiled kernels can be kept on disk."""
    folder = _jit.cache_folder()
    place = "in XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "in the default place"
    if folder is None:
        return Check(
            "cache",
            f"{place}: cannot be made or written to, so that every command compiles what it "
            "lacks; set XDG_CACHE_HOME to a folder that can",
            "bad",
        )
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Check(
        "cache",
        f"{place}: writable, {counted(len(sizes), 'file')}, {format_bytes(sum(sizes))}",
    )


def _compiled() -> Check:
    if not _jit.has_jit():
        return Check(
            "kernels",
            "NUMBA_DISABLE_JIT is set: everything takes a thousand times as long",
            "bad",
        )
    parts = {"metrics": "compiled", "critical-path": "critical-path-corrected"}
    text = [
        f"{name} {'compiled' if _jit.is_compiled(part) else 'not compiled yet'}"
        for name, part in parts.items()
    ]
    return Check("kernels", ", ".join(text))


def _self_test() -> Check:
    """Measure a step, and compare the result with the expected numbers."""
    try:
        row = preparation.run_metric_kernels().iterations.to_pylist()[0]
    except Exception as error:  # the report names the kind of any error
        return _failed("self-test", error)
    wrong = [name for name, expected in _EXPECTED.items() if row[name] != expected]
    if wrong:
        text = ", ".join(f"{name} is {row[name]}, expected {_EXPECTED[name]}" for name in wrong)
        return Check("self-test", text, "bad")
    return Check("self-test", "a step of known numbers is measured right")


def _dask(address: str, wait_s: float) -> Check:
    try:
        from fastcomm.executors import dask

        with dask.connected(address, wait_s=wait_s) as executor:
            threads = executor.client.nthreads()
            differ = len(executor.warnings)
            tested = executor.call(_self_test) if threads else None
    except ConfigError:
        return Check("dask", "no such address, or no extra dask", "bad")
    except ClusterError as error:
        return _failed("dask", error.__cause__ or error)
    return _cluster(threads, differ, tested)


def _cluster(threads: Mapping[str, int], differ: int, tested: Check | None) -> Check:
    """Return the check of a reachable cluster; `differ` counts other versions."""
    text = f"reachable, {len(threads)} workers with {sum(threads.values())} threads"
    if tested is None:
        return Check("dask", text, "bad")
    text += f"; {differ} versions differ from those here" if differ else "; versions as here"
    text += f"; on a worker {tested.found}"
    return Check("dask", text, "note" if differ else tested.state)


_NO_STORE = (
    "not a store: no manifest of `fastcomm ingest` is in it; if these are traces, check them "
    "with `fastcomm info --all`"
)


def _store(folder: Path) -> Check:
    """Compare the files of a store with its manifest."""
    if not (folder / MANIFEST).exists():
        return Check("store", _NO_STORE, "bad")
    try:
        manifest = read_manifest(folder)
        wrong = list(faults(folder, manifest))
    except FastcommError:
        return Check("store", "cannot be opened: `fastcomm info` says why", "bad")
    if wrong:
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Check("store", f"{wrong[0]}{more}", "bad")
    ranks = counted(len(manifest.ranks), "rank")
    return Check("store", f"{ranks}, sizes, footers, pages and tables are as written")


def _failed(name: str, error: BaseException) -> Check:
    kind = "runs another fastcomm" if isinstance(error, FastcommError) else type(error).__name__
    return Check(name, f"failed: {kind}", "bad")


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Read a whole store, and yield a line without a path for each damaged file."""
    if not manifest.complete:
        yield "not whole: run the same `fastcomm ingest` again"
        return
    for entry, file in zip(manifest.ranks, listed(folder, manifest), strict=True):
        if fault := _fault(entry, file):
            yield f"rank {entry.rank}: {fault}"
    for table in manifest.tables:
        if not _is_whole(folder, table):
            yield f"{table_name(table.name)}: missing, or not what was written; ingest again"


def _is_whole(folder: Path, table: TableFile) -> bool:
    try:
        return table_file(folder, table.name) == table
    except OSError:
        return False


def _fault(entry: Entry, file: StoredFile | SkippedRank) -> str:
    """Return how a rank's file in a store is damaged, as text; empty if it is intact.

    `entry` is the record of the file in the manifest; `file` is a `SkippedRank` if its size is
    wrong.
    """
    if isinstance(file, SkippedRank):
        return "its file has another size than the manifest says"
    try:
        if entry.footer != footer_sha256(file.path):
            return "its file has another footer than the manifest says"
        _read_pages(file)
    except (OSError, TraceFileError):
        return "its file is missing or damaged"
    return ""


def _read_pages(file: StoredFile) -> None:
    """Read all pages to verify their checksums. Raises `TraceFileError`."""
    with reader.opened(file.path) as pages:
        arrow_files.check(pages.metadata, file.size, file.path)
        for group in range(pages.metadata.num_row_groups):
            pages.read_row_group(group)
