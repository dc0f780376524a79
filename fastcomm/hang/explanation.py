"""A verdict explained: the group and call, who waits for whom, evidence, what to do next."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastcomm.formats.flight_recorder import DumpedGroup, arguments, frames
from fastcomm.hang.calls import DumpedJob
from fastcomm.hang.evidence import sentences
from fastcomm.hang.job_files import JobFiles
from fastcomm.hang.result import Hang, WaitedCall, WaitedGroup, WaitingLink
from fastcomm.hang.state import JobState, Verdict
from fastcomm.hang.waits import Stop
from fastcomm.trace.run_traces import named_ranks
from fastcomm.trace.tags import tag_of_description
from fastcomm.units import format_ns

_MOST_LINKS = 64
_MOST_LINES = 12


def explained(
    state: JobState, verdict: Verdict, files: JobFiles, failed: Mapping[Path, str]
) -> Hang:
    """Return the result of a verdict on the files of a job; `failed` are errors of dumps."""
    job, stop = state.job, verdict.stop
    links = () if verdict.kind == "none" else tuple(_links(state, verdict))
    return Hang(
        kind=verdict.kind,
        culprits=verdict.culprits,
        group=None if stop is None else _group(stop, job),
        collective=None if stop is None else _call(stop, state),
        place=_place(state, verdict),
        waiting=verdict.waiting,
        missing=job.missing,
        unreadable=job.unreadable,
        dumps=len(job.ranks),
        world_size=job.world,
        confidence=verdict.confidence,
        evidence=(*verdict.evidence, *_evidence(state, verdict)),
        links=links[:_MOST_LINKS],
        calls=len(links),
        next=tuple(_next(state, verdict)),
        failed=tuple(failed.values()),
        warnings=tuple(files.problems),
    )


def _place(state: JobState, verdict: Verdict) -> str | None:
    """Return where the one culprit is in the code, if its stack tells."""
    if len(verdict.culprits) != 1:
        return None
    stack = state.evidence.stacks.get(verdict.culprits[0])
    return None if stack is None else stack.place


def _group(stop: Stop, job: DumpedJob) -> WaitedGroup:
    return titled_group(stop.group, job)


def titled_group(key: DumpedGroup, job: DumpedJob) -> WaitedGroup:
    """Return a group of a dump with its parallelism and the ranks that a job has in it."""
    return WaitedGroup(
        name=key.name,
        desc=key.desc,
        parallelism=tag_of_description(key.desc) if key.desc else None,
        ranks=job.members.get(key, ()),
    )


def _call(stop: Stop, state: JobState) -> WaitedCall:
    """Return what most of those that stand in a stop call."""
    calls = state.waits.stops.get(stop) or state.calls_of(stop)
    ops = Counter(call.op for call in calls.values())
    op = ops.most_common(1)[0][0] if ops else ""
    return WaitedCall(op=op, sequence=stop.number)


def _links(state: JobState, verdict: Verdict) -> Iterator[WaitingLink]:
    """Yield the chain of waiting: what waits for culprits, then the calls with most ranks."""
    waits, culprits = state.waits, {*verdict.culprits}

    def order(stop: Stop) -> tuple[bool, bool, int]:
        is_direct = not culprits.isdisjoint(waits.holders[stop])
        return stop != verdict.stop, not is_direct, -len(waits.stops[stop])

    for stop in sorted(waits.stops, key=order):
        of_op: dict[str, list[int]] = {}
        for rank, call in sorted(waits.stops[stop].items()):
            of_op.setdefault(call.op, []).append(rank)
        for op, ranks in of_op.items():
            ages = [age for rank in ranks if (age := state.age(rank)) is not None]
            yield WaitingLink(
                ranks=tuple(ranks),
                group=_group(stop, state.job).title,
                call=WaitedCall(op=op, sequence=stop.number).title,
                waits_for=tuple(waits.holders[stop]),
                since_ns=max(ages, default=None),
            )


def _evidence(state: JobState, verdict: Verdict) -> Iterator[str]:
    """Yield what carries a verdict: where the culprits stand, and what files say of them."""
    if verdict.kind == "none" and state.unrecorded:
        who = named_ranks(state.unrecorded)
        yield f"no call is recorded in the dumps of {who}: they tell nothing"
    for rank in verdict.culprits[:_MOST_LINES]:
        yield _stand(state, rank)
        if stack := state.evidence.stacks.get(rank):
            yield f"rank {rank} is in {stack.place}, by its stack"
        if rank in state.evidence.dead and rank not in state.job.ranks:
            yield state.evidence.dead[rank]
        if error := state.evidence.errors.get(rank):
            yield f"the log of rank {rank} ends with: {error}"
    if verdict.stop is not None and verdict.kind.startswith("mismatch"):
        yield from _arguments(state, verdict)
    if missing := sorted({*state.job.missing} - {*verdict.culprits}):
        yield f"no dump of {named_ranks(missing)}"
    if unreadable := state.job.unreadable:
        yield (
            f"the dump of {named_ranks(unreadable)} is unreadable, or truncated before where "
            "the rank stands: whether it is in the call of the others, nothing tells"
        )
    group = () if verdict.stop is None else state.job.members.get(verdict.stop.group, ())
    yield from sentences(state.evidence, state.job, verdict.culprits, group)


def _stand(state: JobState, rank: int) -> str:
    """Return where a rank stands, with its file."""
    calls = state.job.ranks.get(rank)
    if calls is None:
        dump = "no readable dump" if rank in state.job.unreadable else "no dump"
        return f"rank {rank} has {dump}"
    if front := state.waits.fronts.get(rank):
        call = front[0]
        number = "" if call.is_message else f" #{call.number}"
        age = state.age(rank)
        time = "" if age is None else f" since {format_ns(age)}"
        place = f"stands in {call.op}{number} of {call.group.desc or call.group.name}{time}"
    else:
        place = "has nothing open"
    if not len(calls.row):
        return f"rank {rank} {place}, and no call ({calls.path})"
    last = calls.call(len(calls.row) - 1)
    number = "" if last.is_message else f" #{last.number}"
    name = last.group.desc or last.group.name
    record = calls.calls.record[-1]
    return (
        f"rank {rank} {place}; its last call is {last.op}{number} of {name} "
        f"({calls.path}, record {record})"
    )


def _arguments(state: JobState, verdict: Verdict) -> Iterator[str]:
    """Yield the calls of a culprit and of another member, with their arguments."""
    assert verdict.stop is not None
    calls_of = state.calls_of(verdict.stop)
    others = [rank for rank in calls_of if rank not in verdict.culprits]
    for rank in (*[one for one in verdict.culprits if one in calls_of][:2], *others[:1]):
        calls = state.job.ranks[rank]
        call = calls_of[rank]
        row = int(calls.row[call.place])
        shapes_in, shapes_out, types_in, types_out = arguments(calls.path, row)
        yield (
            f"rank {rank} calls {call.op} with {shapes_in} {types_in} into "
            f"{shapes_out} {types_out}"
        )
        if stack := frames(calls.path, row):
            own = [frame for frame in stack if "torch/" not in frame]
            yield f"rank {rank} called it in {(own or stack)[0]}"


def _next(state: JobState, verdict: Verdict) -> Iterator[str]:
    """Yield what would decide, or what to look at."""
    if verdict.kind == "none":
        if state.waits.fronts:
            yield "a second set of dumps, some seconds later, shows whether the job goes on"
        if state.unrecorded:
            yield "TORCH_FR_BUFFER_SIZE=2000 in the job, so that its calls are recorded"
        if state.job.missing and verdict.confidence == "low":
            who = named_ranks(state.job.missing)
            yield f"exit codes and the ends of the logs of {who}: dead, or only not dumped"
        return
    if verdict.is_doubted:
        yield "a second set of dumps, some seconds later, into another directory"
    without = [
        rank
        for rank in verdict.culprits
        if rank in state.job.ranks
        and rank not in state.evidence.stacks
        and rank not in state.evidence.dead
    ]
    if without:
        ranks = named_ranks(without[:_MOST_LINES])
        yield f"py-spy dump on {ranks}, saved as stack_RANK.txt here"
    if state.job.unreadable:
        yield f"dumps of {named_ranks(state.job.unreadable)} anew, into another directory"
    missing = [
        rank
        for rank in verdict.culprits
        if rank not in state.job.ranks and rank not in state.evidence.dead
    ]
    if missing:
        yield (
            f"the launcher's exit code and the end of the log of {named_ranks(missing)}: dead, "
            "frozen, or only not dumped"
        )
    if verdict.kind == "stalled":
        yield "NCCL RAS, and counters of the network, on the hosts of these ranks"
