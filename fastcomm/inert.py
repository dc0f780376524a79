"""Text of others, made so that a terminal or a spreadsheet shows it and does nothing else."""

import re

# What moves the cursor, changes colours, begins lines, hides letters or turns their order, and
# halves of letters, which no encoding has.
_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def inert(text: str) -> str:
    r"""The text with such characters written as Python would: `\x1b`, `\n`, `\u202e`."""
    return _ACTIVE.sub(_written, text)


def utf8(text: str) -> str:
    r"""Return the text with bytes of file names that are not UTF-8 written as `\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Whether a text has an encoding, which names of files need not have."""
    return utf8(text) == text


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def inert_lines(text: str) -> str:
    """The same of a message of several lines, of which all but the first are indented."""
    first, *others = text.split("\n")
    return "\n    ".join([inert(first), *(inert(line).lstrip() for line in others)])
