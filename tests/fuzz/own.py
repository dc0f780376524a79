"""Cases of what fastcomm writes: stores of two writers, compiled code, printed output."""

import json
import resource
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from random import Random

import numba

import fastcomm
from fastcomm.errors import FastcommError
from fastcomm.formats.store.layout import read_manifest
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm_kernels._jit import CodeFolder, KernelCache

_RUNS = ("one", "other")
_PRINT = (
    "import sys; from pathlib import Path; import click\n"
    "from fastcomm.cli.messages import exit_on_output_errors\n"
    "with exit_on_output_errors(): \n"
    "    click.echo(Path(sys.argv[1]).read_text('utf-8', 'replace'), color=True)"
)


def two_runs(path: Path) -> None:
    """Write two runs of the same ranks."""
    for steps, name in enumerate(_RUNS, 1):
        write(Job.of(ranks=2, steps=steps, layers=1), path / name)


def two_writers(path: Path) -> None:
    """Ingest both runs into one store at once: it must be one of them, or be refused."""
    errors: list[Exception] = []
    store = path / "store"

    def stored(name: str) -> None:
        try:
            ingest(plan([path / name], store))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=stored, args=(name,)) for name in _RUNS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, FastcommError):
            raise error
    if len(errors) == len(_RUNS):
        raise errors[0]
    fastcomm.open(store).metrics().to_dict()
    folders = {Path(entry.source).parent for entry in read_manifest(store).ranks}
    assert len(folders) == 1, f"a store of {folders}"


def agree(store: Path) -> None:
    """Make a manifest state the sizes of the files, so that damaged ones are read."""
    path = store / "fastcomm.json"
    try:
        said = json.loads(path.read_text())
        for entry in said["ranks"]:
            entry["size"] = (store / entry["file"]).stat().st_size
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # the manifest is what is damaged
    path.write_text(json.dumps(said))


def run_kernel(path: Path) -> None:
    """Call a function whose compiled code lies in a folder, or comes to lie there."""

    def function(number: int) -> int:
        return 2 * number + 1

    compiled = numba.njit(function)
    compiled._cache = KernelCache(function, CodeFolder(path, "code"))
    assert compiled(20) == 41


def print_text(path: Path) -> None:
    """Print a text to a file that may be too small: all of it, or an error that says so."""
    content = path.read_bytes()
    whole = content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    wanted = (whole + "\n").encode()
    rng = Random(content)
    limit = max(rng.randrange(2 * len(wanted)), 1)
    environment = {"PYTHONUNBUFFERED": rng.choice(["", "1"]), "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Python leaves half files behind
    with tempfile.TemporaryFile() as target:
        done = subprocess.run(
            [sys.executable, "-c", _PRINT, path],
            stdout=target,
            stderr=subprocess.PIPE,
            env=environment,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
            check=False,
        )
        target.seek(0)
        found = target.read()
    assert wanted.startswith(found), "another text"
    is_whole = found == wanted
    lines = done.stderr.decode().count("\n")
    assert (done.returncode, lines) == ((0, 0) if is_whole else (1, 1)), done
