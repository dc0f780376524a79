"""Compare what-ifs with steps that have the change: writes a table into `docs/accuracy.md`.

The synthetic job makes both steps: the one that is measured and edited, and the one that is
generated with the change. Step times are from the first mark of all ranks to the last end. The
largest error of each kind of edit goes into `fastcomm/graph/edit_errors.json`, from which every
what-if gets its interval.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastcomm
from fastcomm.critical_path.result import CriticalPath
from fastcomm.graph.edits import parse_edits
from fastcomm.options import EditOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

PAGE = Path(__file__).with_name("accuracy.md")
ERRORS = Path(__file__).parents[1] / "fastcomm" / "graph" / "edit_errors.json"
BAR = 0.02  # largest error of a step time
DEPTHS = (1, 2, 4)  # numbers of pipeline stages
_TABLE = re.compile(
    r"(?<=<!-- written by docs/what_if_accuracy.py -->\n).*?(?=\n\n)", re.DOTALL
)
_NOTHING = 1e-9  # factor of transfers that are as good as hidden


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a job: its edits, and the fields of the job that has it.

    In texts of edits, {straggler} and {partner} are the rank with the fault and the other rank
    of its data-parallel group. `before` are fields of the job that is measured.
    """

    name: str
    edits: dict[str, str]  # by option
    after: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)

    def options(self, job: Job) -> EditOptions:
        """Return the edits for a job."""
        ranks = {"straggler": job.straggler, "partner": partner(job)}
        return EditOptions(
            **{name: (text.format(**ranks),) for name, text in self.edits.items()}
        )


def partner(job: Job) -> int:
    """Return the next rank of the straggler's data-parallel group."""
    rank = job.straggler or 0
    _, data, _ = job.place(rank)
    return rank + ((data + 1) % job.dp - data) * job.tp


def _scaled(name: str, target: str, factor: float) -> Change:
    return Change(name, {"scale": f"{target}={factor:g}"}, {"factors": ((target, factor),)})


CHANGES = (
    _scaled("all communication x 2", "comm", 2.0),
    _scaled("TP x 2", "comm:TP", 2.0),
    _scaled("EP x 2", "comm:EP", 2.0),
    _scaled("DP x 2", "comm:DP", 2.0),
    _scaled("TP x 0.25", "comm:TP", 0.25),
    _scaled("compute x 1.5", "compute", 1.5),
    _scaled("compute x 0.71", "compute", 0.71),
    Change("links at 800 Gbit/s", {"set": "link=800Gbit/s"}, {"link_speed": 100 * 10**9}),
    Change("links at 200 Gbit/s", {"set": "link=200Gbit/s"}, {"link_speed": 25 * 10**9}),
    Change("TP hidden", {"overlap": "TP"}, {"factors": (("comm:TP", _NOTHING),)}),
    Change("EP hidden", {"overlap": "EP"}, {"factors": (("comm:EP", _NOTHING),)}),
    Change("no straggler", {"heal": "rank:{straggler}"}, {"straggler": None}),
    Change(
        "no hot expert",
        {"heal": "rank:{straggler}"},
        {"straggler": None},
        {"fault": "hot_expert", "slowdown": 60},
    ),
    Change(
        "no slow link",
        {"heal": "link:{straggler}-{partner}"},
        {"straggler": None},
        {"fault": "slow_link", "slowdown": 400},
    ),
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
    usual = _path(job)
    for change in changes:
        path = _path(replace(job, **change.before)) if change.before else usual
        predicted = path.predict(parse_edits(change.options(job))).after_ns
        after = _path(replace(job, **{**change.before, **change.after})).length_ns
        yield Cell(path.length_ns, predicted, after)


def _path(job: Job) -> CriticalPath:
    """Return the critical path of a job's step."""
    with TemporaryDirectory() as folder:
        write(job, Path(folder))
        return fastcomm.open(folder).critical_path()


def table(jobs: dict[int, list[Cell]]) -> str:
    """Return the table of all changes and jobs; `jobs` are cells by number of stages."""
    heads = [f"{depth} stage{'s' * (depth > 1)}" for depth in DEPTHS]
    before = [f"{jobs[depth][0].before / 1e6:.2f}" for depth in DEPTHS]
    rows = [["change", *heads], ["---"] * (1 + len(DEPTHS)), ["none", *before]]
    for number, change in enumerate(CHANGES):
        rows.append([change.name, *(str(jobs[depth][number]) for depth in DEPTHS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def errors(jobs: dict[int, list[Cell]]) -> dict[str, float]:
    """Return the largest relative error by kind of edit, rounded up to 0.01 %."""
    largest: dict[str, float] = {}
    for number, change in enumerate(CHANGES):
        (edit,) = parse_edits(change.options(job_of(1))).edits
        error = max(abs(of_job[number].error) for of_job in jobs.values())
        rounded = math.ceil(error * 1e4) / 1e4
        largest[edit.kind] = max(rounded, largest.get(edit.kind, 0.0))
    return dict(sorted(largest.items()))


if __name__ == "__main__":
    measured = {depth: list(cells(job_of(depth))) for depth in DEPTHS}
    text = PAGE.read_text("utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: table(measured), text), "utf-8")
    ERRORS.write_text(json.dumps(errors(measured), indent=2) + "\n", "utf-8")
