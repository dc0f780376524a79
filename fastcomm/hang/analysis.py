"""Why a job hangs: read all dumps and what lies beside them, and judge."""

import gc
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.executors.executor import PRELOAD
from fastcomm.executors.processes import Processes
from fastcomm.files import note_inputs
from fastcomm.files import place as place_of
from fastcomm.formats.detection import no_such_path
from fastcomm.formats.flight_recorder import (
    DumpedGroup,
    ForeignError,
    NoDumpError,
    arguments,
    frames,
    prefix_of,
    rank_of,
    read,
)
from fastcomm.hang.calls import DumpedJob, RankCall, RankCalls, job_of, of_dump
from fastcomm.hang.evidence import gather, sentences
from fastcomm.hang.moments import last_record, of_one_job
from fastcomm.hang.result import Hang, WaitedCall, WaitedGroup, WaitingLink
from fastcomm.hang.state import ENQUEUED, JobState, Verdict
from fastcomm.hang.threads import beside, training
from fastcomm.hang.traces import sentences as traced
from fastcomm.hang.traces import traces_of
from fastcomm.hang.verdict import judge
from fastcomm.hang.waits import Stop
from fastcomm.trace.run import named_ranks
from fastcomm.trace.tags import tag_of_description
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_MOST_LINKS = 64
_MOST_CALLS = 128  # of a rank that are kept, besides those that are open
_BATCH = 64  # files that a worker reads at once
_FEW = 256  # files: fewer are read by one process more quickly
_MOST_LINES = 12
_MOST_BESIDE = 20_000  # files that are no dumps
_LIKE_A_DUMP = re.compile("rank|dump")  # in names that PyTorch and its users give to dumps
_TWO = 2  # moments of dumps
_SECOND = 1_000_000_000
_TIMELY_S = 10  # between the last call and its dump, of a job that goes on


@dataclass(kw_only=True)
class _Files:
    """The files of a job: dumps by rank, and others."""

    dumps: dict[int, list[RankCalls]] = field(default_factory=dict)
    others: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: dict[Path, str] = field(default_factory=dict)  # errors of what may be dumps
    foreign: dict[Path, str] = field(default_factory=dict)  # of what has a dump's name only

    def add(self, more: "_Files") -> None:
        """Add files that another worker has read."""
        for rank, dumps in more.dumps.items():
            self.dumps.setdefault(rank, []).extend(dumps)
        self.others += more.others
        self.problems += more.problems
        self.unread |= more.unread
        self.foreign |= more.foreign

    def settle(self, *, keep_going: bool) -> dict[Path, str]:
        """Return the errors of dumps that cannot be read; other such files are no dumps.

        A dump has a name like other dumps. Raises the first error unless `keep_going`.
        """
        doubtful = self.unread | self.foreign
        every = [dump for own in self.dumps.values() for dump in own] if doubtful else []
        names = {prefix_of(dump.path) for dump in every}
        likely = {*self._instead_of_dumps({dump.path for dump in every})}
        failed = {}
        for path, error in sorted(doubtful.items()):
            prefix = prefix_of(path)
            is_dump = prefix in names or _LIKE_A_DUMP.search(prefix) is not None
            if path in self.foreign:
                is_dump = path in likely
            if is_dump:
                if not keep_going:
                    raise TraceFileError(error)
                failed[path] = error
            else:
                self.others.append(path)
        if len(self.others) > _MOST_BESIDE:
            self.problems.append(
                f"{len(self.others) - _MOST_BESIDE} of {len(self.others)} files beside the "
                f"dumps are not read: {_MOST_BESIDE} are the most"
            )
        return failed

    def _instead_of_dumps(self, dumps: Collection[Path]) -> Iterator[Path]:
        """Yield the foreign files that stand where a dump is absent.

        They lie among dumps of such names; or are of a rank without any, and not among files
        of such names that ranks have besides their dumps.
        """
        places = {_place_of(path) for path in dumps}
        ranked = {(*_place_of(path), rank_of(path)) for path in dumps}
        names = {name for _, name in places}
        beside = {_place_of(path) for path in self.foreign if rank_of(path) in self.dumps}
        for path in self.foreign:
            place, rank = _place_of(path), rank_of(path)
            is_alone = rank not in self.dumps and place not in beside and place[1] in names
            if (*place, rank) not in ranked and (place in places or is_alone):
                yield path


def _place_of(path: Path) -> tuple[Path, str]:
    return path.parent, prefix_of(path)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the collector of cycles from searching the dumps of all ranks again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def diagnose_hang(
    paths: str | Path | Sequence[str | Path], *, keep_going: bool = False
) -> Hang:
    """Find why a job hangs, from the flight-recorder dumps of its ranks.

    Parameters
    ----------
    paths
        Directories, searched to any depth, or files. What lies beside the dumps (stacks of
        Python, logs) is evidence.
    keep_going
        Leave out damaged dumps, with a warning.

    Returns
    -------
    Hang
        `kind` is "none" where nothing hangs.

    Raises
    ------
    FastcommError
        If there is no dump, or one is damaged.

    """
    places = [paths] if isinstance(paths, str | Path) else paths
    files = _read_all(places)
    failed = files.settle(keep_going=keep_going)
    if not files.dumps:
        names = ", ".join(map(str, places)) or "no path"
        errors = [*files.unread.values(), *files.foreign.values()]
        why = "".join(f"; {error}" for error in errors[:1])
        raise TraceFileError(
            f"{names}: no dump of a flight recorder{why}; it is a pickle or JSON file a rank, "
            "with the rank at the end of its name, as TORCH_FR_DUMP_TEMP_FILE says"
        )
    one_job = of_one_job(files.dumps)
    files.dumps = one_job.dumps
    evidence = gather(files.others[:_MOST_BESIDE], files.dumps)
    newest = {rank: own[-1] for rank, own in files.dumps.items()}
    unread = {rank for path in failed if (rank := rank_of(path)) is not None}
    job = job_of(newest.values(), 1 + max(evidence.ranks, default=-1), unread)
    titles = {key: _titled(key, job).title for key in job.members}
    every = [dump for own in files.dumps.values() for dump in own]
    state = JobState(
        job=training(job),
        evidence=evidence.of_job(job, titles),
        first_written=min(dump.written for dump in every),
        is_prompt=not all(dump.has_stacks for dump in every),
        has_stood=any(map(_has_stood, files.dumps.values())),
        spread_s=_spread(newest.values()),
    )
    state, verdict = _judged(state, job, [*_progress(files.dumps)])
    lines = [*_beside(state, job)]
    if verdict.kind == "none" and lines:
        verdict = replace(verdict, confidence="low")
    if one_job.doubted.intersection(verdict.culprits):
        verdict = replace(verdict, confidence="low")
    hang = _result(state, verdict, files, failed)
    hang = replace(hang, evidence=(*hang.evidence, *lines, *one_job.notes))
    more = traced(traces_of(files.others), hang.culprits, job.ranks) if hang.culprits else ()
    return replace(hang, evidence=(*hang.evidence, *more))


def _read_all(paths: Iterable[str | Path]) -> _Files:
    """Read all files, many of them in several processes."""
    files = _Files()
    names = [*_files_of(paths, files.problems)]
    note_inputs(names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, 1 + len(names) // _FEW)
    batches = [names[at : at + _BATCH] for at in range(0, len(names), _BATCH)]
    with Processes(workers, PRELOAD) as processes:
        for part in processes.spread(_read_some, batches):
            files.add(part)
    return files


def _read_some(paths: Sequence[Path]) -> _Files:
    files = _Files()
    for path in paths:
        try:
            dump = read(path)
        except ForeignError as error:
            files.foreign[path] = str(error)
        except NoDumpError:
            files.others.append(path)
        except TraceFileError as error:
            files.unread[path] = str(error)
        else:
            files.dumps.setdefault(dump.rank, []).append(of_dump(dump).shortened(_MOST_CALLS))
            files.problems.extend(dump.problems)
    return files


def _files_of(paths: Iterable[str | Path], problems: list[str]) -> Iterator[Path]:
    for name in paths:
        path = place_of(name)
        if path.is_dir():
            yield from _files_below(path, problems)
        elif path.is_file():
            yield path
        elif path.exists():
            raise TraceFileError(f"{path}: no regular file")  # a pipe would never end
        else:
            raise no_such_path(str(name))


def _files_below(path: Path, problems: list[str]) -> list[Path]:
    """Return the files of a folder and of all below it, sorted by their text.

    What cannot be read is named in `problems`: folders, and pipes under the name of a file.
    """
    files, others, errors = list[Path](), list[Path](), list[OSError]()
    try:
        for folder, _, names in os.walk(path, onerror=errors.append):
            for name in names:
                one = Path(folder, name)
                (files if one.is_file() else others).append(one)
    except RecursionError:
        raise TraceFileError(f"{path}: folders too deep; name that of the dumps") from None
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    if errors and not files:
        raise TraceFileError(f"{errors[0].filename}: {errors[0].strerror}") from errors[0]
    lines = [
        *(f"{error.filename}: {error.strerror}: it is not searched" for error in errors),
        *(f"{one}: no regular file: it is left out" for one in sorted(others, key=str)),
    ]
    problems += lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        problems.append(f"{len(lines) - _MOST_LINES} more such files and folders")
    # By text: paths compare part by part.
    return sorted(files, key=str)


@dataclass(frozen=True, kw_only=True)
class _Progress:
    """A rank that went on between two dumps."""

    sentence: str
    last: int  # when the last call of the first dump was made, or NULL
    is_timely: bool  # whether the time of that file is about that of the call: it is no copy


def _verdict(state: JobState, progress: Sequence[_Progress]) -> Verdict:
    """Return the verdict on the newest dumps; `progress` is that of ranks since older ones.

    It disproves a hang unless all calls that are open now were made after the older dump. Where
    files may be copies, that they are open for long is not certain, and progress is.
    """
    verdict = judge(state)
    if not progress:
        return verdict
    first = state.first_open
    is_before = first is not None and all(first > one.last != NULL for one in progress)
    line = progress[0].sentence
    if verdict.kind == "none" or not is_before:
        return Verdict(kind="none", evidence=(line,))
    if verdict.is_doubted and not all(one.is_timely for one in progress):
        return Verdict(kind="none", confidence="low", evidence=(line,))
    line = f"{line}; the calls that are open now were made after the first of these"
    return replace(verdict, evidence=(*verdict.evidence, line))


def _judged(
    state: JobState, job: DumpedJob, progress: Sequence[_Progress]
) -> tuple[JobState, Verdict]:
    """Return the verdict on the training; once it has stopped, on the threads beside it."""
    verdict = _verdict(state, progress)
    if verdict.kind == "none" and state.job is not job and state.waits.is_over:
        state = replace(state, job=job)
        verdict = _verdict(state, progress)
    return state, verdict


def _beside(state: JobState, job: DumpedJob) -> Iterator[str]:
    """Yield which calls are open for long while the training goes on, or waits for others."""
    for calls, text in (
        (state.passed(), "{who} made other calls since they called {call}, {age} ago"),
        (
            _of_other_threads(state, job),
            "a thread of {who} has been in {call} for {age}, beside the one that trains",
        ),
    ):
        ranks: dict[tuple[DumpedGroup, int, str], list[RankCall]] = {}
        for call in calls:
            ranks.setdefault((call.group, call.number, call.op), []).append(call)
        for own in [*ranks.values()][:_MOST_LINES]:
            ages = (state.ages.age_of(call) for call in own)
            age = max((age for age in ages if age is not None), default=None)
            number = "" if own[0].is_message else f" #{own[0].number}"
            yield text.format(
                who=named_ranks(sorted(call.rank for call in own)),
                call=f"{own[0].op}{number} of the {_titled(own[0].group, job).title}",
                age="an unknown time" if age is None else format_ns(age),
            )


def _of_other_threads(state: JobState, job: DumpedJob) -> Iterator[RankCall]:
    """Yield the old calls that threads stand in that do not train, unless all are judged."""
    if state.job is not job:
        whole = replace(state, job=job)
        yield from (call for call in beside(job, state.job) if not whole.ages.is_young(call))


def _has_stood(own: Sequence[RankCalls]) -> bool:
    """Return whether a rank made no call between two dumps whose times are in the files."""
    if len(own) < _TWO:
        return False
    timed = [dump for dump in own if dump.has_time and not dump.is_cut]
    written = [dump.written for dump in timed]
    states = {(last_record(dump), _enqueued(dump)) for dump in timed}
    return len(states) == 1 and max(written) - min(written) >= _TIMELY_S


def _spread(dumps: Iterable[RankCalls]) -> int:
    """Return by how many seconds some files are later behind the last calls than others.

    That is no more than what they are apart: clocks of hosts, and ranks that made their last
    call before others, are no lateness.
    """
    timed = [dump for dump in dumps if NULL != dump.latest < (dump.written + 1) * _SECOND]
    if not timed:
        return 0
    written = [dump.written for dump in timed]
    behind = [dump.written - dump.latest // _SECOND for dump in timed]
    return min(max(written) - min(written), max(behind) - min(behind))


def _enqueued(dump: RankCalls) -> int:
    """Return how many calls a rank has made in all groups, by the status of these."""
    return sum(group.get(ENQUEUED, 0) for group in dump.status.values())


def _progress(dumps: dict[int, list[RankCalls]]) -> Iterator[_Progress]:
    """Yield the ranks that went on between two moments."""
    several = ((rank, own) for rank, own in dumps.items() if len(own) >= _TWO)
    for rank, own in sorted(several, key=itemgetter(0)):
        ordered = [dump for dump in own if not dump.is_cut]
        folders = {dump.path.parent for dump in ordered}
        if len(folders) < _TWO:
            continue
        first, last = ordered[0], ordered[-1]
        if not len(last.row) and _enqueued(last) > _enqueued(first):
            yield _Progress(
                sentence=f"rank {rank} went on between two dumps: it had made "
                f"{_enqueued(first)} calls in {first.path}, {_enqueued(last)} in {last.path}",
                last=NULL,
                is_timely=False,
            )
        if last_record(last) > last_record(first):
            at = max(first.calls.created.tolist(), default=NULL)
            yield _Progress(
                sentence=f"rank {rank} went on between two dumps: call {last_record(first)} is "
                f"the last in {first.path}, {last_record(last)} in {last.path}",
                last=at,
                is_timely=first.has_time or abs(first.written - at / _SECOND) < _TIMELY_S,
            )


def _result(
    state: JobState, verdict: Verdict, files: _Files, failed: Mapping[Path, str]
) -> Hang:
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
    return _titled(stop.group, job)


def _titled(key: DumpedGroup, job: DumpedJob) -> WaitedGroup:
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
