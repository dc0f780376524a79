"""What stands around the events of a Chrome trace: the members of the outer object.

It is read as ``head + "]" + tail``: the text up to the bracket of the list, and from behind
the one that ends it.
"""

import json
import re
from contextlib import suppress
from typing import Any

import orjson

LIMIT = 1 << 26

_MOST_LISTS = 64  # each costs a look at the text before it

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
NOTHING = _BOM + _BLANKS + b"\0"  # between documents
_BEFORE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")
_KEY = b'"traceEvents"'
_LIST = re.compile(rb"\s*(?::\s*(\[)?)?")
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(-?\d{1,19})\b')
_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_MISSING = re.compile(rb":\s*(?=[,}])")
_MAYBE_END = re.compile(rb"\](?=\s*(?:[\"}]|,\s*\"|\0*$))")
LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEGIN = re.compile(rb'\{\s*"schemaVersion"\s*:')
# It matches an unfinished string, too: so it never looks at a byte twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_EVENT = re.compile(rb'"ph"\s*:\s*"X"')


class CutError(Exception):
    """The outer object ends before its end."""


class DamagedError(Exception):
    """The outer object is no valid JSON."""


class NestedError(Exception):
    """The list is not that of the outer object."""


def begins(text: bytes) -> bool:
    """Whether a text may be the beginning of a trace."""
    start = _start(text)
    return text[start : start + 1] in (b"", b"{", b"[") or _BOM.startswith(text)


def _start(text: bytes) -> int:
    """Where the first character is; the text, which may be long, is copied nowhere."""
    return _BEFORE.match(text).end()  # type: ignore[union-attr]


def events_begin(text: bytes, look_from: int, *, nested: bool = False) -> int:
    """Where the list of events begins; else ``~index`` of where to look in a longer text.

    A list inside an inner object counts only if `nested`.
    """
    start = _start(text)
    if text.startswith(b"[", start):
        return start + 1
    for _ in range(_MOST_LISTS):
        key = text.find(_KEY, look_from)
        if key < 0:
            break
        found = _LIST.match(text, key + len(_KEY))
        look_from = found.end() if found else key + len(_KEY)
        if found and found[1] and (nested or not is_inner(text[start:key])):
            return look_from
        if look_from == len(text):
            return ~key
    return ~max(look_from, len(text) - len(_KEY), 0)


def is_inner(before: bytes) -> bool:
    """Whether a key behind this text belongs to an object inside the outer one."""
    with suppress(orjson.JSONDecodeError):  # most texts are settled so, fast
        return not isinstance(orjson.loads(before + b'"":0}'), dict)
    outside = _STRING.sub(b"", before)
    return outside.count(b"{") - outside.count(b"}") > 1


def members(head: bytes, tail: bytes) -> dict[str, Any]:
    """The members of the outer object; none where the list is all there is.

    Raises `CutError`, `DamagedError` or `NestedError` where there is no such object.
    """
    return _parsed(head.removeprefix(_BOM) + b"]" + tail.rstrip(_BLANKS + b"\0"))


def _parsed(text: bytes | memoryview) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = text[-1:] not in (b"}", b"]") or "unexpected end" in str(error)
        if cut and bytes(text[:64]).lstrip(_BLANKS).startswith(b"{"):
            raise CutError from error
        raise DamagedError(str(error)) from error
    if isinstance(found, list):
        return {}
    if found.get("traceEvents") != []:
        raise NestedError('"traceEvents" is not a key of the outer object')
    return dict(found)


def document_end(head: bytes, tail: bytes) -> int | None:
    """Where in `tail` the outer value ends; None where JSON does not say."""
    text = (head.removeprefix(_BOM) + b"]" + tail).decode("latin-1")  # a character a byte
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return end - len(text.lstrip()) + len(tail)


def second_begin(head: bytes) -> int | None:
    """Where in `head` another outer object begins; None where none does."""
    end = document_end(head, b"")
    if end is not None and end < 0:
        behind = head[end + 1 :].lstrip(NOTHING)
        return len(head) - len(behind)
    begins = [found.start() for found in _BEGIN.finditer(head)]
    return begins[1] if len(begins) > 1 else None


def second_list(tail: bytes) -> int | None:
    """Where in `tail` another list of events begins; None where there is none."""
    found = LIST.search(tail)
    return found and found.start()


def holds_events(tail: bytes) -> bool:
    """Whether there are events in what should be behind them."""
    return _EVENT.search(tail) is not None


def tail_in(head: bytes, rest: bytes) -> bytes | None:
    """What is behind the list if that ends somewhere in `rest`, which begins with damage."""
    before = head.removeprefix(_BOM) + b"]"
    text = bytearray(len(before)) + rest.rstrip(_BLANKS + b"\0")
    for place, _ in zip(_MAYBE_END.finditer(rest), range(256), strict=False):
        # What is overwritten is behind us; the rest, which may be long, is copied nowhere.
        text[place.end() : place.end() + len(before)] = before
        with suppress(CutError, DamagedError):
            _parsed(memoryview(text)[place.end() :])
            return rest[place.end() :]
    return None


def known_members(text: bytes) -> dict[str, Any]:
    """The members of an invalid outer object, or of its beginning, that matter most."""
    known: dict[str, Any] = {}
    if base := _BASE.search(text):
        known["baseTimeNanoseconds"] = int(base[1])
    if info := _INFO.search(text):
        inside = text[info.end() :]
        for attempt in (inside, _MISSING.sub(b": null", inside)):
            try:
                known["distributedInfo"], _ = json.JSONDecoder().raw_decode(
                    attempt.decode(errors="replace")
                )
                break
            except (ValueError, RecursionError):
                continue
    return known
