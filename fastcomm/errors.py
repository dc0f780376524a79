"""What fastcomm raises on purpose, and text of others as messages may show it.

Such text is made inert: a terminal or a spreadsheet shows it and does nothing else.
"""

import os
import re
from collections.abc import Iterable
from shlex import quote

_ASCII = 128
# What moves the cursor, changes colours, begins lines, hides letters or turns their order, and
# halves of letters, which no encoding has.
_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


class FastcommError(Exception):
    """The user can mend this: the message says where it is, what was found, what was wanted."""


class SchemaError(FastcommError):
    """A table lacks a column, or a column has the wrong type."""


class TraceFileError(FastcommError):
    """One file cannot be read; `--keep-going` leaves its rank out and goes on."""


class ConfigError(FastcommError):
    """An option or a configuration file contradicts itself or the run."""


class ClusterError(FastcommError):
    """The workers, or what they have in common, cannot do the work: no rank is at fault."""


def inert(text: str) -> str:
    r"""The text with such characters written as Python would: `\x1b`, `\n`, `\u202e`."""
    return _ACTIVE.sub(_written, text)


def utf8(text: str) -> str:
    r"""Return the text with bytes of file names that are not UTF-8 written as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Whether a text has an encoding, which names of files need not have."""
    return utf8(text) == text


def shell_quoted(text: str) -> str:
    r"""Return a text as a word of a shell; `$'\377'` for what a terminal would not show."""
    if inert(text) == text and is_utf8(text):
        return quote(text)
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError:  # halves of letters, which no name of a file has
        content = utf8(text).encode()
    return f"$'{''.join(map(_escaped, content))}'"


def shell_joined(words: Iterable[str]) -> str:
    """Return a command of these words, as a shell takes it."""
    return " ".join(map(shell_quoted, words))


def _escaped(byte: int) -> str:
    is_plain = byte < _ASCII and (chr(byte).isalnum() or chr(byte) in "-_./ ")
    return chr(byte) if is_plain else f"\\{byte:03o}"


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def inert_lines(text: str) -> str:
    """The same of a message of several lines, of which all but the first are indented."""
    first, *others = text.split("\n")
    return "\n    ".join([inert(first), *(inert(line).lstrip() for line in others)])
