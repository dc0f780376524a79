"""Which ranks are in a call that their dump does not show, as watchdogs and NCCL RAS say."""

from collections.abc import Iterator, Mapping

from fastcomm.hang import ras
from fastcomm.hang.logs import WatchdogLine
from fastcomm.hang.state import JobState
from fastcomm.hang.waits import Stop

_SECOND = 1_000_000_000
_SLACK_S = 2  # between clocks of hosts


def enqueued_lines(state: JobState, stop: Stop, number: int) -> Iterator[WatchdogLine]:
    """Yield what watchdogs say of ranks that have enqueued the call of a stop."""
    name = stop.group.desc or stop.group.name
    for line in state.evidence.watchdog:
        if name in line.group and line.enqueued >= number:
            yield line


def launched_ranks(state: JobState, stop: Stop) -> Mapping[int, str]:
    """Return the ranks that have launched the call of a stop, as RAS says, with its place.

    A report that is older than the calls does not tell, and the dead answered before.
    """
    first = state.first_open
    reports = [
        one
        for one in state.evidence.reports
        if first is None or one.written is None or first // _SECOND <= one.written + _SLACK_S
    ]
    members = state.job.members.get(stop.group, ())
    if stop.number is None:
        return {}
    launched = ras.arrived(reports, members, stop.number)
    return {rank: line for rank, line in launched.items() if rank not in state.evidence.dead}


def ranks_in_call(state: JobState, stop: Stop) -> dict[int, str]:
    """Return the ranks that files say are in the call of a stop, with what says so."""
    lines: dict[int | None, str] = {}
    if stop.number is not None:
        for line in enqueued_lines(state, stop, stop.number):
            says = f"its watchdog says that it enqueued #{line.enqueued} ({line.place})"
            lines[line.rank] = says
    for rank, place in launched_ranks(state, stop).items():
        says = f"NCCL RAS says that it has launched as many operations as others ({place})"
        lines[rank] = says
    return {rank: line for rank, line in lines.items() if rank is not None}
