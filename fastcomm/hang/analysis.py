"""Why a job hangs: read all dumps and what lies beside them, and judge."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.formats.flight_recorder import DumpedGroup, rank_of
from fastcomm.hang.calls import DumpedJob, RankCall, RankCalls, job_of
from fastcomm.hang.evidence import gather
from fastcomm.hang.explanation import explained, titled_group
from fastcomm.hang.job_files import read_files
from fastcomm.hang.moments import of_one_job
from fastcomm.hang.progress import RankProgress, has_stood, ranks_that_went_on
from fastcomm.hang.result import Hang
from fastcomm.hang.state import JobState, Verdict
from fastcomm.hang.threads import beside, training
from fastcomm.hang.traces import sentences as traced
from fastcomm.hang.traces import traces_of
from fastcomm.hang.verdict import judge
from fastcomm.trace.run_traces import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_MOST_LINES = 12
_SECOND = 1_000_000_000


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
    files = read_files(places)
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
    evidence = gather(files.beside, files.dumps)
    newest = {rank: own[-1] for rank, own in files.dumps.items()}
    unread = {rank for path in failed if (rank := rank_of(path)) is not None}
    job = job_of(newest.values(), 1 + max(evidence.ranks, default=-1), unread)
    titles = {key: titled_group(key, job).title for key in job.members}
    every = [dump for own in files.dumps.values() for dump in own]
    state = JobState(
        job=training(job),
        evidence=evidence.of_job(job, titles),
        first_written=min(dump.written for dump in every),
        is_prompt=not all(dump.has_stacks for dump in every),
        has_stood=any(map(has_stood, files.dumps.values())),
        spread_s=_spread(newest.values()),
    )
    state, verdict = _judged(state, job, [*ranks_that_went_on(files.dumps)])
    lines = [*_beside(state, job)]
    if verdict.kind == "none" and lines:
        verdict = replace(verdict, confidence="low")
    if one_job.doubted.intersection(verdict.culprits):
        verdict = replace(verdict, confidence="low")
    hang = explained(state, verdict, files, failed)
    hang = replace(hang, evidence=(*hang.evidence, *lines, *one_job.notes))
    more = traced(traces_of(files.others), hang.culprits, job.ranks) if hang.culprits else ()
    return replace(hang, evidence=(*hang.evidence, *more))


def _verdict(state: JobState, progress: Sequence[RankProgress]) -> Verdict:
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
    state: JobState, job: DumpedJob, progress: Sequence[RankProgress]
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
                call=f"{own[0].op}{number} of the {titled_group(own[0].group, job).title}",
                age="an unknown time" if age is None else format_ns(age),
            )


def _of_other_threads(state: JobState, job: DumpedJob) -> Iterator[RankCall]:
    """Yield the old calls that threads stand in that do not train, unless all are judged."""
    if state.job is not job:
        whole = replace(state, job=job)
        yield from (call for call in beside(job, state.job) if not whole.ages.is_young(call))


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
