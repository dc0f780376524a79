"""Archives and compressed files that are not read: what to type to get files that are."""

import re
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from fastcomm.readers.ranks import rank_from_name

_ARCHIVE = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz|tzst|zip|7z)$", re.IGNORECASE)
_DATABASE = re.compile(r"\.(sqlite3?|db)\.(gz|zst|xz|bz2)$", re.IGNORECASE)
_TRACE = re.compile(r"\.(json\.(xz|bz2|lz4|br)|(jsonl|log)\.(zst|xz|bz2))$", re.IGNORECASE)
_TOOLS = {
    "gz": "gunzip -k",
    "zst": "zstd -d",
    "xz": "xz -dk",
    "bz2": "bunzip2 -k",
    "lz4": "lz4 -dk",
    "br": "brotli -d",
}


def packed(path: Path) -> str | None:
    """Return what to do with an archive or a compression that is not read; None for others."""
    name = quote(str(path))
    if _ARCHIVE.search(path.name):
        tool = "unzip" if path.name.lower().endswith(".zip") else "tar xf"
        tool = "7z x" if path.name.lower().endswith(".7z") else tool
        return f"{path}: an archive; unpack it ({tool} {name}) and give fastcomm the directory"
    if _DATABASE.search(path.name) or _TRACE.search(path.name):
        tool = _TOOLS[path.name.rpartition(".")[2].lower()]
        return f"{path}: this compression is not read; decompress the file: {tool} {name}"
    return None


def is_packed(path: Path) -> bool:
    """Whether a packed file is a trace by its name: an export, or named after a rank."""
    if _DATABASE.search(path.name):
        return True
    is_trace = ".pt.trace.json" in path.name or rank_from_name(path.name) is not None
    return is_trace and packed(path) is not None


def is_unpacked_beside(path: Path, files: Iterable[Path]) -> bool:
    """Whether one of the files is what unpacking this one would give."""
    stem = _ARCHIVE.sub("", path.name)
    stem = path.stem if stem == path.name else stem
    return any(
        (each.parent == path.parent and each.name.startswith((f"{stem}.", f"{stem}_")))
        or each == path.with_name(stem)
        for each in files
    )
