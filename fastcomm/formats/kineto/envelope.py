"""The outer object of a trace: members around its events, and which program wrote it.

Offsets are bytes of the decompressed text.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.formats.sources import ASCEND_REMEDY
from fastcomm.formats.stream import BLANKS, BOM, NOTHING, CutShortError, blocks
from fastcomm.trace.timelines import DRAWN, PROGRAM

_RECORD = "record with torch.profiler"
_OVERLAP = 64  # bytes: no sign is longer
_TORCH_NPU = (
    "a trace of torch_npu (Ascend), whose kernels have no category; it is not read: "
    f"{ASCEND_REMEDY}"
)
# Signs of Chrome traces that are not read, and what the file is.
_CHROME = (
    (re.compile(f'"program":"{PROGRAM}"'.encode()), DRAWN),
    (re.compile(rb'"(?:Ascend Hardware|Overlap Analysis)"'), _TORCH_NPU),
    (
        re.compile(rb'"(?:CPU|CUDA) functions"|"cpu_to_cuda"'),
        "a trace of PyTorch's old autograd profiler, which has no categories; it is not read: "
        f"{_RECORD}",
    ),
    (
        re.compile(rb'"/(?:device|host):[A-Z]+[:"]|"hlo_(?:op|module)"'),
        "a trace of JAX or TensorFlow (XLA), which lacks the categories of the PyTorch "
        "profiler; it is not read",
    ),
    (
        re.compile(rb'"CommHash"|"cat"\s*:\s*"(?:COLL|COLL_API|P2P|P2P_API|PROXY|NET|GROUP)"'),
        "a trace of a profiler plug-in of NCCL, which lacks the work of devices; it is not "
        f"read: {_RECORD}, or with NCCL's Inspector",
    ),
)
_CHROME_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,40})"')
_MOST_NAMED = 5
# Names of events as dPRO writes them, and a member that only its traces have.
_UNIFORM = re.compile(
    rb'"all_prefix"\s*:|"name"\s*:\s*"(?:[^"\\]*->)?'
    rb"(?:(?:FW|BW|FW\+BW|Comm|COMM|COMP|HOST)\.|UPDATE_|OUTPUT|I/O)"
)
# Signs of other JSON, and what the file is.
_OTHER = (
    (
        re.compile(rb'"communicators_count"\s*:|"missing_ranks_count"\s*:'),
        "the state of a job's communicators by NCCL RAS (ncclras), no trace",
    ),
    (
        re.compile(rb'"event"\s*:\s*"PEER_|"group"\s*:\s*"LIFECYCLE"'),
        "events of NCCL RAS (ncclras in monitor mode), no trace",
    ),
)
LIMIT = 1 << 26  # bytes of the members before or behind the events
_MOST_LISTS = 64  # each one costs a scan of the text before it
_BEFORE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")
_KEY = b'"traceEvents"'
_LIST = re.compile(rb"\s*(?::\s*(\[)?)?")
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*"?(-?\d{1,19})\b')
_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_HOST = re.compile(rb'"host_name"\s*:\s*"([^"\\]*)"')
_MISSING = re.compile(rb":\s*(?=[,}])")
_MAYBE_END = re.compile(rb"\](?=\s*(?:[\"}]|,\s*\"|\0*$))")
# A list behind a trace that is a bare list: no value or event can begin there.
BARE_LIST = re.compile(
    rb"(?:\][\s,;]*|[^:,\[\s]\s*)(\[)\s*\{\s*"
    rb'"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s|args)"\s*:'
)
EVENTS_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEGIN = re.compile(rb'\{\s*"schemaVersion"\s*:')
# Unfinished strings match as well, which keeps the time linear.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_EVENT = re.compile(rb'"ph"\s*:\s*"X"')
_QUOTED = re.compile(r"-?[0-9]{1,19}")
_WHOLE = ("baseTimeNanoseconds", "rank", "world_size", "pg_size")


def is_uniform(text: bytes) -> bool:
    """Return whether the events of a text have names of dPRO."""
    return _UNIFORM.search(text) is not None


def chrome(text: bytes) -> str:
    """Return what a Chrome trace without categories of the PyTorch profiler is."""
    program = next((name for sign, name in _CHROME if sign.search(text)), None)
    if program is not None:
        return program
    names = sorted({name.decode(errors="replace") for name in _CHROME_CATEGORY.findall(text)})
    shown = ", ".join(map(repr, names[:_MOST_NAMED])) + ", ..." * (len(names) > _MOST_NAMED)
    categories = f"its categories are {shown}" if names else "its events have none"
    return (
        "a Chrome trace of an unknown program, which lacks the categories of the PyTorch "
        f"profiler ({categories}); it is not read"
    )


def other(text: bytes) -> str | None:
    """Return what a JSON text without trace events is; None if that is unknown."""
    return next((name for sign, name in _OTHER if sign.search(text)), None)


def refuse(path: Path) -> None:
    """Raise TraceFileError for a trace of another program, by any sign in the whole file."""
    end = b""
    with suppress(CutShortError):
        for block in blocks(path):
            text = end + block
            for sign, name in _CHROME:
                if sign.search(text):
                    raise TraceFileError(f"{path}: {name}")
            end = text[-_OVERLAP:]


class CutError(Exception):
    """The outer object is truncated."""


class DamagedError(Exception):
    """The outer object is not valid JSON."""


class NestedError(Exception):
    """The list of events is not a member of the outer object."""


def begins(text: bytes) -> bool:
    """Return whether a text may be the beginning of a trace."""
    start = _start(text)
    return text[start : start + 1] in (b"", b"{", b"[") or BOM.startswith(text)


def _start(text: bytes) -> int:
    """Return the offset of the first character, without copying the text."""
    return _BEFORE.match(text).end()  # type: ignore[union-attr]


def events_begin(text: bytes, look_from: int, *, nested: bool = False) -> int:
    """Return the offset of the list of events, or ``~offset`` where to search a longer text.

    Parameters
    ----------
    text
        The beginning of a trace.
    look_from
        Offset at which the search begins.
    nested
        Whether a list inside an inner object counts.

    """
    start = _start(text)
    if text.startswith(b"[", start):
        return start + 1
    for _ in range(_MOST_LISTS):
        key = text.find(_KEY, look_from)
        if key < 0:
            break
        match = _LIST.match(text, key + len(_KEY))
        look_from = match.end() if match else key + len(_KEY)
        if match and match[1] and (nested or not is_inner(text[start:key])):
            return look_from
        if look_from == len(text):
            return ~key
    return ~max(look_from, len(text) - len(_KEY), 0)


def is_inner(before: bytes) -> bool:
    """Return whether a key behind a text belongs to an object inside the outer one."""
    with suppress(orjson.JSONDecodeError):  # fast, and decides most texts
        return not isinstance(orjson.loads(before + b'"":0}'), dict)
    outside = _STRING.sub(b"", before)
    return outside.count(b"{") - outside.count(b"}") > 1


def members(head: bytes, tail: bytes) -> dict[str, Any]:
    """Return the members of the outer object, with an empty list of events.

    Parameters
    ----------
    head, tail
        The text before the first event, and the text behind the list's end.

    Returns
    -------
    dict
        Empty if the trace is a bare list.

    Raises
    ------
    CutError, DamagedError, NestedError
        If the text is truncated, is not JSON, or the list belongs to an inner object.

    """
    return _parsed(head.removeprefix(BOM) + b"]" + tail.rstrip(BLANKS + b"\0"))


def _parsed(text: bytes | memoryview) -> dict[str, Any]:
    """Parse a document whose list of events was cut out; {} if it is an array."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = text[-1:] not in (b"}", b"]") or "unexpected end" in str(error)
        if cut and bytes(text[:64]).lstrip(BLANKS).startswith(b"{"):
            raise CutError from error
        raise DamagedError(str(error)) from error
    if isinstance(value, list):
        return {}
    if value.get("traceEvents") != []:
        raise NestedError('"traceEvents" is not a key of the outer object')
    return dict(value)


def document_end(head: bytes, tail: bytes) -> int | None:
    """Return the offset in `tail` at which a JSON document ends; None if it is invalid.

    The document is the text before its list of events, `head`, and the text from the end of
    this list on, `tail`.
    """
    text = (head.removeprefix(BOM) + b"]" + tail).decode("latin-1")  # a character a byte
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return end - len(text.lstrip()) + len(tail)


def second_begin(head: bytes) -> int | None:
    """Return the offset in `head` at which another outer object begins, or None."""
    end = document_end(head, b"")
    if end is not None and end < 0:
        behind = head[end + 1 :].lstrip(NOTHING)
        return len(head) - len(behind)
    begins = [match.start() for match in _BEGIN.finditer(head)]
    return begins[1] if len(begins) > 1 else None


def second_list(tail: bytes) -> int | None:
    """Return the offset of the first `"traceEvents": [` in a text, or None without one."""
    match = EVENTS_LIST.search(tail)
    return match and match.start()


def holds_events(tail: bytes) -> bool:
    """Return whether the text that should follow the events has events."""
    return _EVENT.search(tail) is not None


def tail_in(head: bytes, text: bytes) -> bytes | None:
    """Return the text behind the end of the list of events; None if that is not in `text`.

    `head` is the text before the list. `text` may begin with damaged events: an end is where
    head and the rest of the text together are a valid document.
    """
    before = head.removeprefix(BOM) + b"]"
    buffer = bytearray(len(before)) + text.rstrip(BLANKS + b"\0")
    for match, _ in zip(_MAYBE_END.finditer(text), range(256), strict=False):
        # The head is written over text that is done with, so that nothing long is copied.
        buffer[match.end() : match.end() + len(before)] = before
        with suppress(CutError, DamagedError):
            _parsed(memoryview(buffer)[match.end() :])
            return text[match.end() :]
    return None


def recovered_members(text: bytes) -> dict[str, Any]:
    """Return the main members of an outer object that is invalid or truncated."""
    recovered: dict[str, Any] = {}
    if base := _BASE.search(text):
        recovered["baseTimeNanoseconds"] = int(base[1])
    if host := _HOST.search(text):
        recovered["host_name"] = host[1].decode(errors="replace")
    if info := _INFO.search(text):
        inside = text[info.end() :]
        for attempt in (inside, _MISSING.sub(b": null", inside)):
            try:
                recovered["distributedInfo"], _ = json.JSONDecoder().raw_decode(
                    attempt.decode(errors="replace")
                )
                break
            except (ValueError, RecursionError):
                continue
    return recovered


def with_numbers(members: Any) -> Any:
    """Make numbers of `_WHOLE` in quotes integers, however deep they are nested; in place."""
    rest = [members]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            for key, entry in value.items():
                if key in _WHOLE and isinstance(entry, str) and _QUOTED.fullmatch(entry):
                    value[key] = int(entry)
            rest.extend(value.values())
        elif isinstance(value, list):
            # Most are long lists of ranks.
            rest.extend(k for k in value if isinstance(k, (dict, list)))
    return members


def unescaped(data: bytes) -> str:
    """Return the text of a JSON string without quotes; half surrogate pairs are replaced."""
    text = data.decode(errors="replace")
    if "\\" not in text:
        return text
    try:
        unescaped = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
