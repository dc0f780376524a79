"""The events of a window by the corrected rules: what it holds, and who launched what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fastcomm.critical_path.rows import Rows, codes
from fastcomm.critical_path.window import Window
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import links
from fastcomm_kernels.graph import NONE, Column, Flags, Numbers

_LATE = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Rows in order of (start, host before device, longer first), and the waiting rows."""

    rows: Rows
    is_device: Flags
    call: Numbers  # of work: row of its launch, or NONE
    syncs: Rows
    sync_call: Numbers  # of each of `syncs`: row of its call, or NONE

    @classmethod
    def of(cls, trace: Trace, window: Window, data_load: Sequence[str]) -> Self:
        """What a window holds: its operators and calls, and the work that they launched.

        Work whose launch is not in the trace belongs to the window in which it starts.
        """
        whole = Rows.of(trace)
        is_work = whole.of_kind("kernel", "memcpy", "memset")
        is_call = whole.kind == KIND["runtime"]
        is_sync = whole.kind == KIND["sync"]
        call = _calls(whole, is_call, is_work | is_sync)
        inside = (whole.start >= window.start) & (whole.start < window.stop)
        host = is_call | (whole.kind == KIND["cpu_op"])
        for regex in data_load:
            host |= ~is_work & ~is_sync & whole.matching(regex)
        host &= inside
        launched = np.where(call >= 0, host[call], inside)
        kept = host | (is_work & launched)
        order = _ordered(whole, is_work, np.flatnonzero(kept))
        place = np.full(len(whole) + 1, NONE, np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        syncs = np.flatnonzero(is_sync & launched & (call >= 0))
        return cls(
            rows=whole.without("position", "stream", "wait_stream", "wait_record").take(order),
            is_device=is_work[order],
            call=place[call[order]],
            syncs=whole.take(syncs),
            sync_call=place[call[syncs]],
        )


def _calls(rows: Rows, is_call: Flags, is_device: Flags) -> Numbers:
    """The call of each row on a device, or NONE: the last of its correlation."""
    code = np.full(len(rows), NONE, np.int32)
    asked = is_call | is_device
    (code[asked],), count = codes(rows.correlation[asked])
    partner = links.partners(code, count, is_device, rows.position)
    partner[~is_device] = NONE
    return partner


def _ordered(rows: Rows, is_work: Flags, kept: Column) -> Column:
    tie = -rows.stop
    tie[is_work] += _LATE
    graphs.settle(kept, rows.start, tie)
    return kept
