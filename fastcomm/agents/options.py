"""Arguments of the tools, whose fields are the JSON schemas that clients get."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastcomm.agents.answer import RowsPage
from fastcomm.agents.session import RunChoice
from fastcomm.checks import RANK, RANKS, TOKENS, WHOLE, Range
from fastcomm.device_work.options import KernelKey
from fastcomm.errors import ConfigError
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import CheckedOptions, build, option_field

_MOST_ROWS, _MOST_TOKENS = 500, 10_000
_RUN = "Name of a run, as list_runs prints it."
_STEP = "Number of the step. Default: the second, or the only one."
_RANKS = "Show only the rows of these ranks, as in 0-7,12."


def _argument(text: str, default: Any = None, **about: Any) -> Any:
    return option_field(text, default, group=None, **about)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageArguments(CheckedOptions):
    """How much of an answer is shown."""

    table: str | None = _argument("Name of another table of the answer to show.")
    ranks: str | None = _argument(_RANKS)
    offset: int = _argument("First row to show, from 0.", 0, limits=WHOLE)
    limit: int = _argument("Most rows to show.", 10, limits=Range(1, _MOST_ROWS))
    max_tokens: int = _argument(
        "Most tokens of the answer.", 2000, limits=Range(300, _MOST_TOKENS)
    )

    def page(self) -> RowsPage:
        """Return which rows an answer shows."""
        return RowsPage(
            table=self.table,
            ranks=None if self.ranks is None else _numbers(self.ranks),
            offset=self.offset,
            limit=self.limit,
            tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments(PageArguments):
    """A run, and how its ranks are laid out if the traces do not say so."""

    required: ClassVar[tuple[str, ...]] = ("run",)

    run: str = _argument(_RUN, "", may_be_empty=True)
    layout: str = _argument(
        "Sizes of the parallelisms where traces do not name them: tp=2,pp=4,dp=1.",
        "",
        may_be_empty=True,
    )

    @property
    def choice(self) -> RunChoice:
        """The run and its layout."""
        if not self.run:
            raise ConfigError("run is missing; list_runs names the runs")
        return RunChoice(run=self.run, layout=self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureArguments(RunArguments):
    """What is measured of a run."""

    steps: str | None = _argument("Count only these steps, as in 4-6,12.")
    link_bandwidth: str | None = _argument(
        "Bandwidth of a GPU's link, as in 400Gbit/s, for utilization."
    )

    @property
    def metrics(self) -> MetricsOptions:
        """The options of the measurement."""
        steps = None if self.steps is None else _numbers(self.steps)
        return build(
            MetricsOptions, {"steps": steps, "link_bandwidth": self.link_bandwidth}, "measure"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArguments(RunArguments):
    """Which kernels are listed."""

    by: KernelKey = _argument("What a row is.", "name")
    match: str | None = _argument("Regular expression that names must match.", is_regex=True)
    rank: int | None = _argument("Only this rank. Default: all.", limits=RANK)
    step: int | None = _argument("Only this step. Default: all.", limits=WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryArguments(RunArguments):
    """A query on a run."""

    query: str = _argument(
        "One SELECT of DuckDB over the views ranks, steps, events, collectives, waits, "
        "findings, metrics and kernels. Without it, the answer has their columns.",
        "",
        may_be_empty=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareArguments(PageArguments):
    """Two runs, or their saved metrics."""

    required: ClassVar[tuple[str, ...]] = ("before", "after")

    before: str = _argument("Run before, or its saved metrics (a .json file).", "")
    after: str = _argument("Run after, or its saved metrics.", "")
    with_kernels: bool = _argument("Compare kernels and operators, too; slower.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathArguments(RunArguments):
    """The step of a critical path."""

    step: int | None = _argument(_STEP, limits=WHOLE)
    rank: int | None = _argument("Path of this rank alone. Default: all.", limits=RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfArguments(PathArguments):
    """Changes of a step; without any, a fixed set is tried."""

    scale: tuple[str, ...] = _argument("Multiply durations: comm:TP=0.5, compute=0.9.", ())
    set: tuple[str, ...] = _argument("Set durations or a link: link:TP=800Gbit/s.", ())
    heal: tuple[str, ...] = _argument("Make as its peers: rank:5, stage:2, link:3-7.", ())
    remove: tuple[str, ...] = _argument("Remove: wait:TP, launches, gaps, op:Broadcast.", ())
    overlap: tuple[str, ...] = _argument("Hide a parallelism under compute: DP.", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments(PageArguments):
    """The job for which strategies are searched."""

    required: ClassVar[tuple[str, ...]] = ("model", "gpus", "global_batch")

    model: str = _argument("Model: a preset such as llama3-70b, or a size as in 7B.", "")
    gpus: int = _argument("Number of GPUs.", 1, limits=RANKS)
    global_batch: int = _argument("Sequences of a step.", 1, limits=TOKENS)
    seq_len: int | None = _argument("Tokens of a sequence. Default: 8192.", limits=TOKENS)
    cluster: str = _argument("Cluster: dgx-h100, dgx-b200, gb200-nvl72, ...", "dgx-h100")
    trainer: Literal["megatron", "nemo", "nemo-fsdp", "fsdp", "fsdp2", "deepspeed"] = _argument(
        "Trainer whose strategies count.", "megatron"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePageArguments(RunArguments):
    """A page of a run."""

    name: str = _argument("Name of the file, as in report.html.", "report.html")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of "0-7,12". Raises `ConfigError` for anything else."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(one.isdecimal() and one.isascii() and len(one) < 8 for one in (first, last)):  # noqa: PLR2004
            raise ConfigError(f"{text!r}: expected numbers, as in 0-7,12")
        if int(last) - int(first) > 10**6:
            raise ConfigError(f"{text!r}: too many numbers")
        numbers += range(int(first), int(last) + 1)
    return tuple(dict.fromkeys(numbers))
