"""Large results as JSON that a person can read, too: a row a line."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fastcomm.inert import utf8

_STEP = "  "
_ENCODER = json.JSONEncoder(allow_nan=False)
_HALF = "\\ud"  # how the encoder begins a character that has no encoding of its own


def dumps(value: Any) -> str:
    r"""Return an indented JSON text that any parser reads; ValueError for NaN.

    Bytes of file names that are not UTF-8 are written as in messages: `\udcff`.
    """
    text = json.dumps(value, indent=2, allow_nan=False)
    return json.dumps(_utf8(value), indent=2, allow_nan=False) if _HALF in text else text


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, Mapping):
        return {_utf8(key): _utf8(each) for key, each in value.items()}
    return list(map(_utf8, value)) if isinstance(value, list | tuple) else value


def text(found: Mapping[str, Any]) -> str:
    """An object with a line for each value, and for each item of a value; ValueError for NaN.

    To indent what is deeper would be most of the time, and of the text, for thousands of ranks.
    """
    values = (f"{_STEP}{_plain(str(key))}: {_value(each)}" for key, each in found.items())
    return _block("{", values, "", "}")


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        items = (
            f"{_STEP * 2}{_plain(str(key))}: {_plain(each)}" for key, each in value.items()
        )
        return _block("{", items, _STEP, "}")
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return _block("[", (f"{_STEP * 2}{_plain(row)}" for row in value), _STEP, "]")
    return _plain(value)


def _block(begin: str, lines: Iterable[str], indent: str, end: str) -> str:
    return "\n".join((begin, ",\n".join(lines), indent + end))


def _plain(value: Any) -> str:
    text = _ENCODER.encode(value)
    return _ENCODER.encode(_utf8(value)) if _HALF in text else text
