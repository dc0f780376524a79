"""Exceptions of fastcomm, and functions that make foreign text safe to show in messages.

Inert text has no control characters: a terminal or a spreadsheet only shows it.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from shlex import quote

_ASCII = 128
# Characters that move the cursor, change colors, begin lines, hide letters or reverse their
# order; and surrogates, which have no encoding.
_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


class Lines(str):
    """A text of several lines whose line breaks are fastcomm's own.

    In any other text a line break is a character of a name, and is escaped where it is shown:
    otherwise a name could begin a line that looks like advice.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the text itself, so that an error with it keeps its lines."""
        return self


class FastcommError(Exception):
    """An error that the user can fix. The message says what happened, where, and what to do."""

    def __str__(self) -> str:
        """Return the message with control characters of names escaped."""
        text = super().__str__()
        return Lines("\n".join(inert_parts(text))) if isinstance(text, Lines) else inert(text)


class SchemaError(FastcommError):
    """A table without a required column, or a column of the wrong type."""


class TraceFileError(FastcommError):
    """A file cannot be read. `--keep-going` skips its rank."""


class ConfigError(FastcommError):
    """An option or a configuration file is invalid, or contradicts the run."""


class ClusterError(FastcommError):
    """The workers of a cluster cannot do the work; no rank is at fault."""


# An option of the command line, before a colon only if it begins the message; the options of
# other tools are followed by a value or a colon.
_NAME = "--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
_OPTION = re.compile(rf"^{_NAME}(?=:)|(?<![\w-]){_NAME}(?![\w=:-])")


@contextmanager
def python_names() -> Iterator[None]:
    """Name options as Python does, `link_bandwidth`, in errors that are raised inside."""
    try:
        yield
    except FastcommError as error:
        error.args = tuple(as_python(str(text)) for text in error.args)
        raise


def as_python(text: str) -> str:
    """Return a text with options named as Python does: `link_bandwidth`."""
    return _OPTION.sub(_argument, text)


def _argument(option: re.Match[str]) -> str:
    return (option[1] or option[2]).replace("-", "_")


def inert(text: str) -> str:
    r"""Return the text with control characters escaped: `\x1b`, `\n`, `\u202e`."""
    return _ACTIVE.sub(_escape_match, text)


def utf8(text: str) -> str:
    r"""Return the text with bytes of file names that are not UTF-8 written as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Whether the text can be encoded as UTF-8; names of files may contain surrogates."""
    return utf8(text) == text


def shell_quoted(text: str) -> str:
    r"""Quote an argument for a shell; unprintable bytes become `$'\377'`."""
    if inert(text) == text and is_utf8(text):
        return quote(text)
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError:  # surrogates that stand for no byte of a file name
        content = utf8(text).encode()
    return f"$'{''.join(map(_escaped, content))}'"


def shell_joined(arguments: Iterable[str]) -> str:
    """Join and quote arguments to the line of a shell."""
    return " ".join(map(shell_quoted, arguments))


def _escaped(byte: int) -> str:
    is_plain = byte < _ASCII and (chr(byte).isalnum() or chr(byte) in "-_./ ")
    return chr(byte) if is_plain else f"\\{byte:03o}"


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def inert_parts(text: str) -> list[str]:
    """Return the lines of `Lines`, or another text as one line, with all names inert."""
    return (
        [inert(line) for line in text.split("\n")] if isinstance(text, Lines) else [inert(text)]
    )


def inert_lines(text: str) -> str:
    """Make a message inert, and indent all lines of `Lines` but the first."""
    first, *others = inert_parts(text)
    return "\n    ".join([first, *(line.lstrip() for line in others)])
