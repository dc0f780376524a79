"""Reports, and exports of kinds that are not read: what to type to get one that is."""

from pathlib import Path
from shlex import quote

# Exports of other kinds, and the kind to ask for.
_UNREAD = {
    ".arrows": "arrowdir",
    ".h5": "parquetdir",
    ".hdf": "parquetdir",
}


def unexported(path: Path) -> str | None:
    """What to do with a report, or with an export of a kind that is not read; None: neither."""
    if path.suffix.lower() == ".nsys-rep":
        return _not_exported(path)
    if (kind := _UNREAD.get(path.suffix.lower())) is not None:
        return (
            f"{path}: an export that fastcomm does not read; wanted sqlite, parquetdir or "
            f"arrowdir: nsys export --type={kind} ..."
        )
    return None


def _not_exported(path: Path) -> str:
    """What to do with a report that was never exported."""
    return (
        f"{path}: a report that only nsys can read. Export it, with the payloads of NCCL, and "
        "give fastcomm the new file:\n"
        f"    nsys export --type=sqlite --include-blobs=true "
        f"--output={quote(str(path.with_suffix('.sqlite')))} {quote(str(path))}\n"
        "(an nsys that does not know --include-blobs: --include-json=true.)"
    )
