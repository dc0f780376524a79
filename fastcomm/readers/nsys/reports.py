"""Export reports of Nsight Systems with the `nsys` of the user's path, into the cache.

Only nsys can read its reports. An export is kept: the next command of the same report reads it.
"""

import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm_kernels import temporary

_LOG = logging.getLogger("fastcomm")
# With the payloads of NCCL; the second is for an nsys that does not know the first.
_PAYLOADS = ("--include-blobs=true", "--include-json=true")
_LONGEST = 200  # characters of what nsys says
_PRIVATE = 0o700


def exported(report: Path) -> Path | None:
    """Return the export of a report; None if there is no nsys, or no place for the export.

    Raises `TraceFileError` if nsys cannot export the report.
    """
    program, folder = _program(), _folder(report)
    if program is None or folder is None:
        return None
    export = folder / report.with_suffix(".sqlite").name
    if export.is_file():
        return export
    _LOG.info("fastcomm: %s: exporting it with %s (once)", report, program)
    unfinished = folder / f"{os.getpid()}.sqlite"
    try:
        for payloads in _PAYLOADS:
            done = _run(program, payloads, unfinished, report)
            if done.returncode == 0 and unfinished.is_file():
                unfinished.replace(export)
                return export
    finally:
        unfinished.unlink(missing_ok=True)
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    reason = lines[-1][:_LONGEST] if lines else "no export, and no reason"
    raise TraceFileError(f"{report}: {program} export: exit code {done.returncode}: {reason}")


def _run(
    program: str, payloads: str, export: Path, report: Path
) -> "subprocess.CompletedProcess[bytes]":
    """Run nsys. Raises `TraceFileError` if it cannot be started."""
    options = ["--type=sqlite", "--force-overwrite=true", payloads, f"--output={export}"]
    try:
        return subprocess.run(
            [program, "export", *options, str(report.absolute())],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise TraceFileError(f"{report}: {program}: {error.strerror or error}") from error


def _program() -> str | None:
    """Return the path of nsys; None without one, and for one in the working directory."""
    program = shutil.which("nsys")
    if program is None or not Path(program).is_absolute():
        return None
    return None if temporary.is_in_working_directory(Path(program).resolve()) else program


def _folder(report: Path) -> Path | None:
    """Return the directory for the export of a report as it is now; None without a cache."""
    home = temporary.cache_home()
    try:
        status = report.stat()
    except OSError:
        return None
    if home is None:
        return None
    state = f"{report.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = home / "nsys" / hashlib.sha256(os.fsencode(state)).hexdigest()[:32]
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
