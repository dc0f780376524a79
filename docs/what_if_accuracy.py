"""Compare what-ifs with steps that have the change: writes a table into `docs/accuracy.md`.

The synthetic job makes both steps: the one that is measured and edited, and the one in which
durations have the factors of the edit from the start. Step times are from the first event of
all ranks to the last.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import fastcomm
from fastcomm.graph.edits import DurationChange
from fastcomm.replay.predictions import durations
from fastcomm.synthetic import Job, write

PAGE = Path(__file__).with_name("accuracy.md")
BAR = 0.02  # largest error of a step time
DEPTHS = (1, 2, 4)  # numbers of pipeline stages
_TABLE = re.compile(
    r"(?<=<!-- written by docs/what_if_accuracy.py -->\n).*?(?=\n\n)", re.DOTALL
)
# Operators of the kernels that are slow on the straggler; `mm` runs other kernels, too, for
# which its peers then wait no longer.
_SLOW = (
    "FW.aten::mm",
    "FW.flash_attn::_flash_attn_forward",
    "FW._RotaryEmbedding",
    "BW.aten::mm",
    "BW.flash_attn::_flash_attn_backward",
    "BW.autograd::engine::evaluate_function: _RotaryEmbedding",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a job, with the factors of durations; none for a job without straggler."""

    name: str
    factors: tuple[tuple[str, float], ...] = ()

    def applied(self, job: Job) -> Job:
        """Return the job with the change."""
        return (
            replace(job, factors=self.factors) if self.factors else replace(job, straggler=None)
        )


CHANGES = (
    Change("all communication x 2", (("comm", 2.0),)),
    Change("TP x 2", (("comm:TP", 2.0),)),
    Change("EP x 2", (("comm:EP", 2.0),)),
    Change("DP x 2", (("comm:DP", 2.0),)),
    Change("TP x 0.25", (("comm:TP", 0.25),)),
    Change("compute x 1.5", (("compute", 1.5),)),
    Change("compute x 0.71", (("compute", 0.71),)),
    Change("no straggler"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Step times in ns: measured before the change, predicted, and measured after it."""

    before: float
    predicted: float
    after: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.predicted / self.after - 1

    def __str__(self) -> str:
        predicted, after = (f"{ns / 1e6:.2f}" for ns in (self.predicted, self.after))
        return f"{predicted} / {after} ({self.error:+.1%})".replace("%)", " %)")


def job_of(depth: int) -> Job:
    """Return the job with `depth` pipeline stages, and with every kind of parallelism."""
    return Job.of(4 * depth, tp=2, pp=depth, dp=2, steps=1)


def cells(job: Job, changes: tuple[Change, ...] = CHANGES) -> Iterator[Cell]:
    """Yield the cell of each change of a job."""
    with TemporaryDirectory() as folder:
        write(job, Path(folder))
        run = fastcomm.open(folder)
        path = run.critical_path()
        for change in changes:
            if change.factors:
                edits = [fastcomm.scale(*factor) for factor in change.factors]
                predicted: float = path.what_if(*edits).after_ns
            else:
                predicted = _without_straggler(run, job)
            yield Cell(path.length_ns, predicted, _step_ns(change.applied(job)))


def _step_ns(job: Job) -> float:
    """Return the step time of a job."""
    with TemporaryDirectory() as folder:
        write(job, Path(folder))
        return fastcomm.open(folder).critical_path().length_ns


def _without_straggler(run: fastcomm.Run, job: Job) -> float:
    """Return the step time if the straggler's operations are as fast as those of its peers."""
    replayer = run.replay().replayed.replayer
    change = DurationChange(ratio=1 / (1 + job.slowdown / 100))
    changes = {f"host0.rank{job.straggler}->{name}": change for name in _SLOW}
    return float(replayer.run(durations(replayer, changes)).end.max())


def table() -> str:
    """Return the table of all changes and jobs."""
    jobs = {depth: list(cells(job_of(depth))) for depth in DEPTHS}
    heads = [f"{depth} stage{'s' * (depth > 1)}" for depth in DEPTHS]
    before = [f"{jobs[depth][0].before / 1e6:.2f}" for depth in DEPTHS]
    rows = [["change", *heads], ["---"] * (1 + len(DEPTHS)), ["none", *before]]
    for number, change in enumerate(CHANGES):
        rows.append([change.name, *(str(jobs[depth][number]) for depth in DEPTHS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: table(), text), "utf-8")
