"""What a process runs: the versions that decide what it computes, and of which text of ours."""

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from fastcomm.errors import ClusterError
from fastcomm.version import __version__

# What numbers and their bytes depend on.
_PACKAGES = ("numpy", "pyarrow", "numba", "scipy")


@cache
def code() -> str:
    """The hash of the text of fastcomm and its kernels: equal where the code is."""
    digest = hashlib.sha256()
    for package in ("fastcomm", "fastcomm_kernels"):
        found = find_spec(package)
        for folder in map(Path, (found and found.submodule_search_locations) or ()):
            for path in sorted(folder.rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions by name; a package that is not there is "none"."""
    return {
        "fastcomm": f"{__version__} ({code()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: installed(name) or "none" for name in _PACKAGES},
    }


def check_code(wanted: str) -> None:
    """On a worker: ClusterError where this fastcomm is not the caller's."""
    if code() != wanted:
        raise ClusterError(
            f"a worker runs fastcomm {versions()['fastcomm']}, wanted the text {wanted}: "
            "install it there and start the workers again"
        )


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_same(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compare the versions of other processes, by address, with those of this one.

    Raises `ClusterError` where fastcomm differs, and gives a warning for each other difference.
    """
    ours, warnings = versions(), []
    for name, wanted in ours.items():
        differ: dict[str, list[str]] = {}
        for address, theirs in found.items():
            if theirs.get(name) != wanted:
                differ.setdefault(theirs.get(name, "none"), []).append(address)
        for other, addresses in differ.items():
            more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
            where = f"{addresses[0]}{more}"
            if name == "fastcomm":
                raise ClusterError(
                    f"{where}: fastcomm {other}, and here {wanted}; wanted the same on all: "
                    "install this one there and start the workers again"
                )
            warnings.append(f"{where}: {name} {other}, and here {wanted}: results may differ")
    return warnings
