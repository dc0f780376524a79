"""Rows of a Kineto file as text, laid out as Kineto lays them out; times come in as int ns.

A row begins with its line break and ends with its comma. Names must be plain: no quote, no
backslash.
"""

import json
import re
from collections.abc import Sequence
from enum import Flag, auto

from fastcomm.synthetic.calls import Call
from fastcomm.synthetic.schedule import BASE_NS

LISTED = 30  # items of a list in an argument; the rest is cut off


class Variant(Flag):
    """How a file differs from what PyTorch writes today."""

    TODAY = 0
    BASE_LAST = auto()  # the base of all times stands after the events
    COMPACT = auto()  # written again by a tool: no line breaks, no zeros at the end of a number
    HOST_METADATA = auto()  # only the host rows say what a collective is
    UNDESCRIBED = auto()  # no group has a description


def compact(text: str) -> str:
    """The same JSON on one line."""
    text = re.sub(r"(?<=[{\[])\s*\n\s*", "", text)
    text = re.sub(r"\s*\n\s*(?=[,}\]])", "", text)
    text = re.sub(r"\s*\n\s*| {2,}", " ", text)
    return re.sub(r'("(?:ts|dur)": \d+\.\d+?)0+(?=\D)', r"\1", text)


def lane(process: int | str, thread: int | str) -> str:
    """Where a row stands: the two keys that say so."""
    return f'"pid": {json.dumps(process)},\n    "tid": {json.dumps(thread)}'


def microseconds(ns: int) -> str:
    """Decimal text, three places, without a float."""
    digits = f"{ns:04d}"
    return f"{digits[:-3]}.{digits[-3:]}"


def complete(cat: str, name: str, where: str, start: int, ns: int, args: str) -> str:
    """A row with a duration; `args` is the inside of the object."""
    return f"""
  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    {where},
    "ts": {microseconds(start - BASE_NS)},
    "dur": {microseconds(ns)}
    ,
    "args": {{
      {args}
    }}
  }},"""


def flow(phase: str, correlation: int, where: str, moment: int) -> str:
    """One end of the arrow from a launch to its work."""
    ends = ',\n    "bp": "e"' if phase == "f" else ""
    return f"""
  {{
    "ph": "{phase}",
    "id": {correlation},
    {where},
    "ts": {microseconds(moment - BASE_NS)},
    "cat": "ac2g",
    "name": "ac2g"{ends}
    
  }},"""  # noqa: W293


def label(what: str, where: str, moment: int, value: str | int) -> str:
    """A row that names or orders a process or a thread."""
    key = {"sort_index": "sort_index", "labels": "labels"}.get(what.partition("_")[2], "name")
    return f"""
  {{
    "ph": "M",
    "name": "{what}",
    "ts": {microseconds(moment - BASE_NS)},
    {where},
    "args": {{
      "{key}": {json.dumps(value)}
    }}
  }},"""


def instant(name: str, where: str, moment: int) -> str:
    """A row without a duration."""
    return f"""
  {{
    "ph": "i",
    
    "s": "g",
    "name": "{name}",
    {where},
    "ts": {microseconds(moment - BASE_NS)}
    
  }},"""  # noqa: W293


def listed(items: Sequence[int]) -> str:
    """A list inside a string, as PyTorch writes it."""
    cut = ", ..." if len(items) > LISTED else ""
    return "[" + ", ".join(map(str, items[:LISTED])) + cut + "]"


def metadata(call: Call, variant: Variant) -> str:
    """The arguments that say what a collective is, but for its number."""
    group = call.group
    described = "undefined" if variant & Variant.UNDESCRIBED else group.description
    found: dict[str, object] = {
        "Collective name": call.operation.collective,
        "In msg nelems": call.sent,
        "Out msg nelems": call.received,
        "Group size": group.size,
        "dtype": call.dtype,
        "In split size": listed(call.send_splits),
        "Out split size": listed(call.receive_splits),
        "Process Group Name": group.name,
        "Process Group Description": described,
        "Process Group Ranks": listed(group.ranks),
    }
    if call.peers:
        # Each side names the other one alone.
        sends = call.operation.collective == "send"
        found["Dst Rank" if sends else "Src Rank"] = call.peers[sends]
    return json.dumps(found)[1:-1]
