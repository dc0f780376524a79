"""The pass of each event: forward, backward or the update of the optimizer.

The innermost annotation around its launch that names one decides; an annotation that names two
is ignored. Elsewhere work of autograd's threads is of the backward pass, and all other work of
the forward pass.
"""

import re
from collections.abc import Callable

import numpy as np

from fastcomm.trace.events import EventRows
from fastcomm.trace.schema import KIND
from fastcomm_kernels.arrays import Ints

FORWARD, BACKWARD, UPDATE = range(3)
PASSES = ("forward", "backward", "update")
_NAMES = {
    UPDATE: re.compile(r"(?i)optimizer"),
    BACKWARD: re.compile(r"(?i)backward|(?<![a-z])bwd|^autograd::engine"),
    FORWARD: re.compile(r"(?i)forward|(?<![a-z])fwd"),
}
_ENGINE = "autograd::engine"
_STEP = re.compile(r"^ProfilerStep#|(?i:optimizer)")


def passes(events: EventRows, rows: Ints, call: Ints) -> Ints:
    """Return the pass of some events, as an index into `PASSES`.

    Parameters
    ----------
    events
        The events of a rank.
    rows
        The rows of the events in question.
    call
        For each of them the row of the call that launched it, or its own row if it has none.
        Device work without a call, as in a table of operations, has the pass that its name
        tells.

    """
    named = _by_name(events, _pass_of_name)
    is_mark = events.of_kind("cpu_op") & (named == BACKWARD)
    is_mark |= (events.kind == KIND["annotation"]) & (named >= 0)
    mark = events.enclosing(np.flatnonzero(is_mark), call)
    result = np.where(mark >= 0, named[mark], _of_thread(events)[events.lane[call]])
    is_alone = events.of_kind("kernel", "memcpy", "memset")[rows] & (call == rows) & (mark < 0)
    return np.where(is_alone & (named[rows] >= 0), named[rows], result)


def _by_name(events: EventRows, value: Callable[[str], int]) -> Ints:
    """Return `value` of each event's name; it is called once per distinct name."""
    return np.array([value(name) for name in events.texts], np.int64)[events.name]


def _pass_of_name(name: str) -> int:
    """Return the pass that the name of an annotation tells; -1 for none or several."""
    named = [number for number, rule in _NAMES.items() if rule.search(name)]
    return named[0] if len(named) == 1 else -1


def _of_thread(events: EventRows) -> Ints:
    """Return the pass by lane: BACKWARD on threads of autograd that run no optimizer."""
    engine = _by_name(events, lambda name: name.startswith(_ENGINE)) == 1
    steps = _by_name(events, lambda name: _STEP.search(name) is not None) == 1
    result = np.full(int(events.lane.max(initial=-1)) + 1, FORWARD, np.int64)
    result[events.lane[engine]] = BACKWARD
    result[events.lane[steps]] = FORWARD
    return result
