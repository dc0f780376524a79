"""Search names with regular expressions in time that grows with their length.

Python's `re` may take time that grows with the square of a text, or exponentially. So it
searches only the beginning of names, for fastcomm's own patterns. Expressions of users are
matched by RE2, whose time is linear, except for those that it does not have (lookaround,
backreferences). Files may not have these: somebody else may have written them.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from fastcomm import checks
from fastcomm.checks import shortened
from fastcomm.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

# Characters of a name that Python searches; the names of kernels of CUTLASS have about 2000.
MOST_SEARCHED = 1 << 12
# Means {0,n} in Python, and these characters in RE2.
_OPEN_COUNT = "{,"


def search(pattern: str | re.Pattern[str], name: str) -> re.Match[str] | None:
    """Find one of fastcomm's own patterns in the first `MOST_SEARCHED` characters of a name."""
    # Without the cache of `re`, which takes longer than the search of a short name.
    compiled = re.compile(pattern) if isinstance(pattern, str) else pattern
    return compiled.search(name, 0, MOST_SEARCHED)


@lru_cache(maxsize=256)
def is_linear(regex: str) -> bool:
    """Whether RE2 has the syntax of a regular expression."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.match_substring_regex(pa.array([""]), regex)
    except pa.ArrowInvalid:
        return False
    return _OPEN_COUNT not in regex


def check_of_file(name: str, text: str) -> None:
    """Raise `ConfigError` if a file's regular expression is invalid, or its time unbounded."""
    checks.regex(name, text)
    if not is_linear(text):
        raise ConfigError(
            f"{name}{': ' if name else ''}{shortened(text)!r}: a file may have only regular "
            "expressions that RE2 knows, without (?=...), (?!...), (?<...), backreferences and "
            "{,n}: others may take endless time"
        )


def matches(names: "pa.Array | pa.ChunkedArray", regex: str) -> "pa.Array | pa.ChunkedArray":
    """Return whether each name matches a user's regular expression anywhere.

    Raises
    ------
    ConfigError
        If the text is no regular expression of Python.

    """
    import pyarrow as pa
    import pyarrow.compute as pc

    pattern = checks.regex("", regex)
    if is_linear(regex):
        return pc.match_substring_regex(names, regex)
    return pa.array(
        [search(pattern, name) is not None for name in names.to_pylist()], pa.bool_()
    )


@lru_cache(maxsize=1 << 13)
def is_match(regex: str, name: str) -> bool:
    """Return whether a name matches a user's regular expression anywhere."""
    import pyarrow as pa

    flag: bool = matches(pa.array([name], pa.string()), regex)[0].as_py()
    return flag


def first_groups(regex: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return the first group of a user's regular expression for each name that matches it.

    The group is None if the expression has none, or it takes no part in the match.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    pattern = checks.regex("", regex)
    if not is_linear(regex):
        results = {name: search(pattern, name) for name in names}
        return {
            name: match[1] if pattern.groups else None
            for name, match in results.items()
            if match is not None
        }
    texts = pa.array(names, pa.string())
    texts = texts.filter(matches(texts, regex))
    if not pattern.groups:
        return dict.fromkeys(texts.to_pylist())
    whole = rf"^(?s:.*?)(?:{regex})(?s:.*)$"
    groups = pc.replace_substring_regex(texts, whole, r"\1").to_pylist()
    return {name: group or None for name, group in zip(texts.to_pylist(), groups, strict=True)}
