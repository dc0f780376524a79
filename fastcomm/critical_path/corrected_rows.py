"""The events of a window by the corrected rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fastcomm.critical_path.window import TimeRange
from fastcomm.trace.events import EventRows
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers

# Calls that take the lock of their process. Nsight Systems appends a version to names.
_VERSION = r"(_v\d+)?(_ptsz|_ptds)?$"
LOCKED = (
    r"^(cudaHostAlloc|hipHostMalloc|cudaLaunchKernel(ExC)?|cuLaunchKernel(Ex)?"
    r"|cudaLaunchCooperativeKernel|cudaGraphLaunch|cuGraphLaunch"
    r"|hip(Ext)?(Module)?LaunchKernel|hipGraphLaunch"
    r"|(cuda|hip)Mem(cpy|set)Async)" + _VERSION
)
# Calls that return when what was launched before has ended.
WAITS_FOR_DEVICE = r"^(cuda|hip)(Device|Thread)Synchronize|^cuCtxSynchronize"
WAITS_FOR_STREAM = r"^(cuda|hip|cu)StreamSynchronize"
WAITS_FOR_EVENT = r"^(cuda|hip|cu)EventSynchronize"
# Copies that return when they are done.
COPIES = r"^(cudaMemcpy|hipMemcpy|hipMemcpyWithStream|cuMemcpy[DHA]to[DHA])(_v\d+)*(_ptds)?$"
# Work that its call waits for, whatever the call is named.
WAITED_FOR = r"DtoH.*Pageable"

RECORDS = r"^(cuda|hip|cu)EventRecord"
STREAM_WAITS = r"^(cuda|hip|cu)StreamWaitEvent"


_LATE = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Rows in order of (start, host before device, longer first), and the waiting rows."""

    rows: EventRows
    is_device: Flags
    call: Numbers  # of work: row of its launch, or NONE
    syncs: EventRows
    sync_call: Numbers  # of each of `syncs`: row of its call, or NONE

    @classmethod
    def of(cls, trace: Trace, window: TimeRange, data_load: Sequence[str]) -> Self:
        """What a window holds: its operators and calls, and the work that they launched.

        Work whose launch is not in the trace belongs to the window in which it starts.
        """
        whole = EventRows.whole(trace)
        is_work = whole.of_kind("kernel", "memcpy", "memset")
        is_sync = whole.kind == KIND["sync"]
        call = np.full(len(whole), NONE, np.int32)
        on_device = np.flatnonzero(is_work | is_sync)
        call[on_device] = whole.launch_of(on_device)
        inside = (whole.start >= window.start) & (whole.start < window.stop)
        host = whole.of_kind("runtime", "cpu_op")
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


def _ordered(rows: EventRows, is_work: Flags, kept: Ints) -> Ints:
    tie = -rows.stop
    tie[is_work] += _LATE
    graphs.settle(kept, rows.start, tie)
    return kept
