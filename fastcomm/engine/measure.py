"""The metrics of a run: every rank measured, the partials merged, the questions answered."""

from collections.abc import Callable, Iterable
from functools import partial

from fastcomm.engine.local import Outcome, map_ranks
from fastcomm.errors import FastcommError
from fastcomm.metrics.partial import Partial, merge
from fastcomm.metrics.result import Failure, Metrics, answer
from fastcomm.metrics.view import ByteKind
from fastcomm.trace.run import Run
from fastcomm.units import parse_bandwidth

_BLOCK = 16  # ranks

Progress = Callable[[Outcome[Partial]], None]


def compute_metrics(
    run: Run,
    *,
    link_bandwidth: str | float | None = None,
    bytes: ByteKind = "payload",  # noqa: A002 - the word of the command line
    iterations: Iterable[int] | None = None,
    workers: int = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Metrics:
    """Measure METRIC 0-5 of a run.

    `link_bandwidth` is that of one GPU's link: bytes per second, or words ("400Gbit/s"); by
    default what the run's configuration says. `iterations` are the numbers of those that count.
    With several `workers`, a script needs `if __name__ == "__main__":`. Raises the first rank's
    error, or, with `keep_going`, lists it in `failed`; then only if no rank is left.
    """
    link = (
        parse_bandwidth(link_bandwidth) if isinstance(link_bandwidth, str) else link_bandwidth
    )
    only = None if iterations is None else frozenset(iterations)
    measure = partial(Partial.of, byte_kind=bytes, only=only)
    partials, failed = _Blocks(), []
    for outcome in map_ranks(run, measure, workers):
        if outcome.partial is not None:
            partials.add(outcome.partial)
        elif keep_going:
            failed.append(_failure(outcome))
        elif outcome.error is not None:
            raise outcome.error
        if progress is not None:
            progress(outcome)
    if len(failed) == len(run.sources):
        raise FastcommError(f"no rank could be read: {failed[0].error}")
    whole = partials.merged()
    if only is not None and not whole.iterations.num_rows:
        raise FastcommError(f"no iteration of the run has one of the numbers {sorted(only)}")
    return answer(
        whole,
        byte_kind=bytes,
        link=link if link is not None else run.link_bandwidth,
        warnings=run.warnings,
        failed=sorted(failed, key=lambda failure: failure.path),
    )


class _Blocks:
    """Partials, merged block by block: many small tables would pin the memory between them."""

    def __init__(self) -> None:
        self.blocks: list[Partial] = []
        self.fresh: list[Partial] = []

    def add(self, partial: Partial) -> None:
        self.fresh.append(partial)
        if len(self.fresh) == _BLOCK:
            self.blocks.append(merge(self.fresh))
            self.fresh = []

    def merged(self) -> Partial:
        return merge(self.blocks + self.fresh)


def _failure(outcome: Outcome[Partial]) -> Failure:
    source = outcome.source
    return Failure(rank=source.rank, path=str(source.path), error=str(outcome.error))
