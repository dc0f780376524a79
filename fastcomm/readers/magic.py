"""What a file is by its first bytes, in words for a message: bytes are never printed."""

from collections.abc import Callable
from pathlib import Path
from shlex import quote

_TAR_AT = 257  # where the header of a tar archive has its mark
# Begin of the text, what it is, and the command that makes it readable ({} is the file).
_KINDS: tuple[tuple[Callable[[bytes], bool], str, str], ...] = (
    (
        lambda head: head[_TAR_AT : _TAR_AT + 5] == b"ustar",
        "a tar archive",
        "unpack it (tar xf {}) and give fastcomm the directory",
    ),
    (
        lambda head: head.startswith(b"SQLite format 3\0"),
        "a SQLite database",
        "decompress it (gunzip -k, zstd -d) to a file named .sqlite",
    ),
    (
        lambda head: head.startswith((b"PK\3\4", b"PK\5\6")),
        "a ZIP archive",
        "unpack it (unzip {}) and give fastcomm the directory",
    ),
    (
        lambda head: head.startswith(b"\xfd7zXZ\0"),
        "compressed by xz",
        "decompress it first (xz -dk {})",
    ),
    (
        lambda head: head.startswith(b"BZh"),
        "compressed by bzip2",
        "decompress it first (bunzip2 -k {})",
    ),
    (
        lambda head: head.startswith(b"7z\xbc\xaf"),
        "a 7-Zip archive",
        "unpack it (7z x {}) and give fastcomm the directory",
    ),
    (
        lambda head: head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")),
        "compressed twice",
        "decompress it once first",
    ),
    (lambda head: head.startswith(b"PAR1"), "a Parquet file", "name it .parquet"),
)
_SHOWN = 16
_PRINTABLE = frozenset(range(32, 127)) | frozenset(b"\t\r\n")


def unpack(head: bytes, path: Path) -> str | None:
    """Return what a file of a known other kind is and what to do with it; None for others."""
    for is_kind, words, remedy in _KINDS:
        if is_kind(head):
            return f"{words}; {remedy.format(quote(str(path)))}"
    return None


def described(head: bytes) -> str:
    """Return how a text begins: quoted if it is printable ASCII, else "binary data"."""
    begin = head[:_SHOWN]
    if begin and _PRINTABLE.issuperset(begin):
        return f"text that begins with {begin.decode()!r}"
    return "binary data"
