"""Expected result of a scan of a Chrome trace, by the standard library's JSON."""

import json
import re
from decimal import ROUND_HALF_UP, Decimal, localcontext

FAR = 1 << 62
KINDS = {"kernel": 0, "cuda_runtime": 1, "cpu_op": 2, "python_function": 3}
KEPT, NAMED = ("kernel", "cuda_runtime"), ("c10d::", "nccl:")
NUMBERS, TEXTS = ("correlation", "stream"), ("dtype", "Process Group Name")
DETAIL_NUMBERS = ("Seq",)
DECIDING = ("cat", "name")
LONG = 20_000  # ns


class TwiceError(ValueError):
    """An event names its category, name or duration twice, and not the same."""


class Object(dict):
    """An object; of a key that comes twice the last value counts."""

    def __init__(self, members):
        super().__init__(members)
        # A duration decides only where short events are left out.
        by_length = ("dur",) if self.get("cat") == "python_function" else ()
        deciding = (*DECIDING, *by_length)
        repeated = members if len(self) < len(members) else ()
        self.twice = any(key in deciding and self[key] != value for key, value in repeated)
        self.is_spelled = any(
            key in ("ph", "cat") and re.search("[\ue020-\ue07a]", str(value))
            for key, value in repeated or self.items()
        )


def loads(text):
    return json.loads(
        text.decode("utf-8-sig"), parse_float=Decimal, object_pairs_hook=Object, strict=False
    )


def scaled(number, scale):
    """A number as a 64-bit integer; None where it is no number or too large."""
    if isinstance(number, bool) or not isinstance(number, int | Decimal):
        return None
    with localcontext() as context:
        context.prec = 2000
        if Decimal(number).adjusted() > 30:
            return None
        value = int((Decimal(number) * 10**scale).to_integral_value(ROUND_HALF_UP))
    return value if abs(value) < 1 << 63 else None


def spelled(text):
    """Of each event whether its phase or category spells a character as an escape.

    Such a character becomes one that nobody uses, and is found in what JSON makes of the text.
    """
    marked = re.sub(rb"(?<!\\)\\u00([2-7][0-9a-fA-F])", rb"\\ue0\1", text)
    return [isinstance(event, Object) and event.is_spelled for event in events_of(marked)]


def whole(value):
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+(\.[0-9]*)?", value):
        value = Decimal(value)
    return scaled(value, 0)


def fit(text):
    """Half a surrogate pair is no character."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def lane(value):
    if isinstance(value, str):
        return fit(value)
    value = scaled(value, 0)
    return value if value is not None and value > -FAR else None


def is_wanted(event):
    is_named, cat = has_selected_name(event), event.get("cat")
    return event.get("ph") == "X" and (
        cat in KEPT
        or (cat == "cpu_op" and is_named)
        or (cat == "python_function" and (is_named or is_long(event)))
    )


def has_selected_name(event):
    name = event.get("name")
    return isinstance(name, str) and name.startswith(NAMED)


def is_kept_by_length(event):
    """Whether only its length keeps an event: its args are not read."""
    return event.get("cat") == "python_function" and not has_selected_name(event)


def is_long(event):
    """Whether an event is of at least 20 us; of one without a length, it is unknown."""
    length = scaled(event.get("dur"), 3)
    return length is None or length >= LONG


def record(event):
    """What is kept of a wanted event; None where its time is no time."""
    start, length = scaled(event.get("ts"), 3), scaled(event.get("dur"), 3)
    if start is None or length is None or abs(start) >= FAR or not 0 <= length < FAR:
        return None
    name, args = event.get("name"), event.get("args")
    if not isinstance(args, dict) or is_kept_by_length(event):
        args = {}
    return {
        "kind": KINDS[event["cat"]],
        "name": fit(name) if isinstance(name, str) else "",
        "process": lane(event.get("pid")),
        "thread": lane(event.get("tid")),
        "start": start,
        "stop": start + length,
        **{key: whole(args.get(key)) for key in NUMBERS + DETAIL_NUMBERS},
        **{
            key: fit(args[key]) if isinstance(args.get(key), str) else args.get(key)
            for key in TEXTS
        },
    }


def events_of(text):
    found = loads(text)
    return found if isinstance(found, list) else found["traceEvents"]


def records(text):
    """The records of the wanted events of a valid trace; None for one that does not parse."""
    events = events_of(text)
    if any(isinstance(event, Object) and event.twice for event in events):
        raise TwiceError
    return [
        record(event) if is_wanted(event) else "unwanted"
        for event in events
        if isinstance(event, dict)
    ]
