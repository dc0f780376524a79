"""Predicted beside measured training runs: writes `docs/plan-runs.md`.

It also writes the error to expect and the range of these runs into
`fastcomm/isp/evaluation.py`. The runs lie outside of the repository:
`python docs/plan_runs.py FOLDER` reads `runs.csv` and `models.csv` there, and vTrain's table in
`isp` beside it.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from fastcomm.hardware.gpus import gpu
from fastcomm.models import Model, load_models
from fastcomm.planning.job import Plan
from fastcomm.planning.price import CALIBRATED, Constants, price_plan
from fastcomm.planning.result import covered
from fastcomm.planning.runs import (
    GroupError,
    RunPrice,
    RunTable,
    TrainingRun,
    errors,
    held_out_errors,
    is_fp8,
    load_runs,
    price_run,
)
from fastcomm.planning.trainers import TRAINERS

PAGE = Path(__file__).with_name("plan-runs.md")
EVALUATION = Path(__file__).parents[1] / "fastcomm" / "planning" / "result.py"
# Values before any fit, from what such systems usually reach: where cross-validation begins.
NEUTRAL = Constants(
    network_share=0.8,
    overlap_loss=0.2,
    tp_exposed=0.7,
    elementwise=1.5,
    gemm_slowdown=1.05,
    host_layer_s=0.9e-3,
    host_experts=6,
    host_expert=0.2,
    experts_slowdown=1.5,
    straggling=0.001,
    step_s=20e-3,
)
FACTOR = TRAINERS["deepspeed"].host_factor
_HEAD = """\
# Strategy search: how far off

How far are predictions of `fastcomm plan`, `plan price` and `plan evaluate` from measured runs?
This page is for readers who plan a cluster by them. `docs/plan_runs.py` compares 315 published
runs, whose tables are not part of fastcomm, with predictions in tokens/s/GPU. Runs that their
sources call traced, tests or regressions do not count. One row (r326) divides experts over
64 ranks where a pipeline stage has 32, which Megatron refuses: it is priced all the same. 168
more, mostly mixtures of experts with settings that are not modeled yet, are left out.

GPUs marked "not measured" are priced by kernels of a similar one.

Rules without a constant, such as which attention kernel a year has, were chosen with all of
these runs in view. So the errors on runs held out are those of the constants, not of the rules.
"""
_GROUPS = """\
## All runs

Median and 90th percentile of absolute errors, and the median error (above 0 is too fast), with
the shipped constants, which were fitted to all of these runs but ten. In `memory` is the median
absolute error of the memory, where the source has it. In `no fit` are runs that ran, but were
predicted not to fit."""
_CLASSES = """\
## Classes of runs

Mean absolute error of the runs that their sources vouch for, by class."""
_ORDER = """\
Over groups of at least five runs of one source and model, the mean rank correlation (Spearman)
of predicted and measured throughput is {order:.2f}, over pairs that differ by more than 5 %.
{fits} of {runs} runs are predicted to fit. No source says which strategies ran out of memory.

Of 1440 iterations of Megatron-DeepSpeed on 1 to 8 A100 of one node (vTrain), times are off by
{0:.1f} % on average, and the strategy predicted to be the fastest takes
{1:.1f} % longer than the fastest measured one, on average over {groups} jobs.
One constant of the trainer was fitted to them: its host takes 1.55 times as long to launch a
layer. Without it the numbers are {2:.1f} % and {3:.1f} %. Fitted without each of the
{models} models in turn, it is {factors}; on the model left out, the numbers are {4:.1f} % and
{5:.1f} %."""
_LEFT_OUT = """\
With one constant at its start, the others as fitted, the mean absolute error of all runs is:"""
_HELD_OUT = """\
## Runs that the constants have not seen

Five times, the constants are fitted to four fifths of the pairs of source and model, and judged
on the others. These are the errors to expect of your own runs; each prediction carries those of
its row."""
_CONSTANTS = """\
## Constants

These hold for all trainers and GPUs: none has constants of its own but Megatron-DeepSpeed.
Everything else comes from data sheets and measured kernels. Fitted constants started from the
value on the left; `--calibrate-from` fits them to runs of your own."""
_MEANING = {
    "network_share": "share of the bandwidth between nodes that collectives reach",
    "overlap_loss": "share of the shorter of two overlapped parts that is lost",
    "tp_exposed": "share of tensor-parallel communication that nothing overlaps",
    "elementwise": "bytes moved by element-wise kernels, over fused ones",
    "gemm_slowdown": "time of a GEMM in a step, over the kernel alone",
    "host_layer_s": "time of the host to launch a layer, both passes, in s",
    "host_experts": "that of a layer with experts, over a usual one",
    "host_expert": "what each expert of a rank adds to that",
    "experts_slowdown": "time of a layer of experts in a trainer, over a fused one",
    "straggling": "share of the step lost to the slowest node, a doubling of nodes",
    "step_s": "time of the host outside of layers, in s",
}


def _table(head: Sequence[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def load(folder: Path) -> RunTable:
    """The first collection of runs in a folder, and those of it that cannot be priced.

    A second one (`n`) is mostly of mixtures of experts whose settings are not modeled yet.
    """
    table = load_runs(folder / "runs.csv", load_models(folder / "models.csv"))
    return RunTable(
        runs=tuple(run for run in table.runs if run.id.startswith("r")),
        failed=tuple(row for row in table.failed if row.id.startswith("r")),
    )


def groups(runs: Iterable[TrainingRun]) -> str:
    """The table of errors by source, GPU, precision and kind of model."""
    rows = [
        [
            _name(group),
            str(group.runs),
            f"{group.median * 100:.1f} %",
            f"{group.most * 100:.0f} %",
            f"{group.bias * 100:+.1f} %",
            "n/a" if group.memory is None else f"{group.memory * 100:.0f} %",
            str(group.do_not_fit),
        ]
        for group in errors(price_run(run, Constants()) for run in runs)
    ]
    return _table(["", "runs", "median", "90 % below", "bias", "memory", "no fit"], rows)


def _name(group: GroupError) -> str:
    """The name of a group; a GPU without measurements is marked."""
    if group.by in {"all", "layers"}:
        return group.name
    mark = " (not measured)" if group.by == "gpu" and gpu(group.name).derived else ""
    return f"{group.by} {group.name}{mark}"


def held_out(runs: Iterable[TrainingRun]) -> str:
    """The table of errors on groups that the fit has not seen."""
    usable = [run for run in runs if run.is_usable]
    off = held_out_errors(usable, NEUTRAL)
    rows = []
    kinds = [(e, f) for e in (False, True) for f in (False, True)]
    for experts, fp8 in kinds:
        own = [
            o for run, o in off if (run.has_experts, is_fp8(run.precision)) == (experts, fp8)
        ]
        name = f"{'experts' if experts else 'dense'}, {'FP8' if fp8 else 'bf16 or fp16'}"
        rows.append([name, *_numbers(own)])
    rows.append(["all", *_numbers([o for _, o in off])])
    return _table(["", "runs", "median", "90 % below", "bias"], rows)


def _is_dense(chips: tuple[str, ...], *, fp8: bool | None = None) -> Callable[[RunPrice], bool]:
    """A class of dense models on some GPUs; `fp8` chooses the precision."""
    return lambda row: (
        row.run.gpu in chips
        and not row.run.has_experts
        and (fp8 is None or is_fp8(row.run.precision) == fp8)
    )


LONG = 32768
# Classes of runs, and the mean absolute error that each may have.
CLASSES: dict[str, tuple[Callable[[RunPrice], bool], float]] = {
    "A100, dense": (_is_dense(("a100", "a100-40")), 0.15),
    "H100, dense, bf16": (_is_dense(("h100",), fp8=False), 0.15),
    "H100, dense, FP8": (_is_dense(("h100",), fp8=True), 0.15),
    "H100, experts": (lambda row: row.run.gpu == "h100" and row.run.has_experts, 0.25),
    "B200": (lambda row: row.run.gpu == "b200", 0.15),
    "GB200": (lambda row: row.run.gpu == "gb200", 0.15),
    "FSDP": (lambda row: row.price.plan.is_fsdp, 0.15),
    "sequences of 32K and more": (lambda row: row.price.plan.seq_len >= LONG, 0.15),
    "all": (lambda _row: True, 0.12),
}


def vouched(runs: Iterable[TrainingRun], constants: Constants | None = None) -> list[RunPrice]:
    """The prices of measured runs of quality `ok`."""
    shipped = constants or Constants()
    return [price_run(run, shipped) for run in runs if run.measured and run.quality == "ok"]


def mean_error(rows: Iterable[RunPrice]) -> float:
    """Mean absolute error of the throughput."""
    return float(np.mean([abs(row.error or 0.0) for row in rows]))


def classes(rows: Sequence[RunPrice]) -> str:
    """The table of mean errors by class."""
    lines = []
    for name, (belongs, bar) in CLASSES.items():
        own = [row for row in rows if belongs(row)]
        bias = np.mean([row.error for row in own if row.error is not None])
        shares = f"{mean_error(own):.1%}", f"{bias:+.1%}", f"{bar:.0%}"
        lines.append([name, str(len(own)), *(share.replace("%", " %") for share in shares)])
    return _table(["class", "runs", "mean error", "bias", "bar"], lines)


_LEAST_GROUP, _EQUAL = 5, 1.05


def order(rows: Iterable[RunPrice]) -> float:
    """Mean rank correlation of groups of a source and model, over pairs that differ.

    It is Spearman's coefficient, whose covariance and variances are sums over pairs, without
    the pairs whose throughput differs by at most 5 %.
    """
    groups: dict[tuple[str, str], list[RunPrice]] = {}
    for row in rows:
        groups.setdefault(row.run.group, []).append(row)
    found = []
    for own in groups.values():
        measured = np.array([row.run.measured for row in own], np.float64)
        ranks = rankdata(measured)
        mine = rankdata([row.price.tokens_per_s_per_gpu for row in own])
        pairs = np.array(
            [
                (ranks[i] - ranks[j], mine[i] - mine[j])
                for i, j in combinations(range(len(own)), 2)
                if max(measured[i] / measured[j], measured[j] / measured[i]) > _EQUAL
            ]
        ).reshape(-1, 2)
        if len(own) >= _LEAST_GROUP and len(pairs):
            x, y = pairs.T
            found.append((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    return float(np.mean(found))


def left_out(runs: Sequence[TrainingRun]) -> str:
    """The table of mean errors with one constant at its start."""
    pairs = [("none", Constants())] + [
        (f"`{name}`", replace(Constants(), **{name: getattr(NEUTRAL, name)}))
        for name in CALIBRATED
    ]
    rows = [[name, f"{mean_error(vouched(runs, fit)) * 100:.1f} %"] for name, fit in pairs]
    return _table(["constant at its start", "mean error"], rows)


Jobs = dict[tuple[int, ...], list[tuple[float, float]]]


def node_jobs(path: Path, factor: float = FACTOR) -> Jobs:
    """Predicted and measured times of vTrain's iterations in s, by job.

    A job is a model (its hidden size, heads and layers come first), a length, a batch and a
    number of GPUs. `factor` takes the place of the host's factor of Megatron-DeepSpeed.
    """
    constants = replace(Constants(), host_layer_s=Constants().host_layer_s * factor / FACTOR)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    jobs: Jobs = {}
    for row in rows:
        gpus, batch, micro, hidden, heads, layers, seq_len, tp, _dp, pp = map(int, row[:10])
        gpt = Model(
            name="gpt",
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            layers=layers,
            ffn=4 * hidden,
            vocab=51200,
            mlp="gelu",
            tied=True,
        )
        plan = Plan(
            model=gpt,
            gpu="a100",
            gpus=gpus,
            global_batch=batch,
            seq_len=seq_len,
            node_bytes_per_s=100e9,
            domain=8,
            tp=tp,
            pp=pp,
            micro_batch=micro,
            sharding="ddp",
            recompute="full",
            precision="fp16",
            trainer="deepspeed",
            overlap=False,
            year=2022.0,
        )
        pair = price_plan(plan, constants).step_s, float(row[10]) / 1e3
        jobs.setdefault((hidden, heads, layers, seq_len, gpus, batch), []).append(pair)
    return jobs


def single_node(jobs: Jobs) -> tuple[float, float, int]:
    """Mean error of the times, mean regret of the fastest, and number of jobs.

    The regret is the measured time of the predicted fastest over that of the fastest, minus 1.
    """
    off = [abs(mine / measured - 1) for pairs in jobs.values() for mine, measured in pairs]
    regret = [min(pairs)[1] / min(t for _, t in pairs) - 1 for pairs in jobs.values()]
    return float(np.mean(off)), float(np.mean(regret)), len(jobs)


def factor_held_out(path: Path) -> tuple[list[float], float, float]:
    """Factors fitted without one model, then mean error and regret on the jobs of each."""
    grid = {float(factor): node_jobs(path, factor) for factor in np.arange(1, 2.01, 0.05)}
    factors, judged = [], Jobs()
    for model in sorted({key[:3] for key in grid[1.0]}):

        def error(factor: float, out: tuple[int, ...] = model) -> float:
            return single_node({k: v for k, v in grid[factor].items() if k[:3] != out})[0]

        factors.append(min(grid, key=error))
        judged |= {k: v for k, v in grid[factors[-1]].items() if k[:3] == model}
    return factors, *single_node(judged)[:2]


def _numbers(off: list[float]) -> list[str]:
    size = np.abs(off)
    return [
        str(len(off)),
        f"{np.median(size) * 100:.1f} %",
        f"{np.percentile(size, 90) * 100:.0f} %",
        f"{np.median(off) * 100:+.1f} %",
    ]


def constants() -> str:
    """The table of the fitted constants."""
    rows = [
        [f"`{name}`", f"{getattr(NEUTRAL, name):g}", f"{getattr(Constants(), name):g}", meaning]
        for name, meaning in _MEANING.items()
    ]
    return _table(["constant", "before", "fitted", "meaning"], rows)


def write_expected(runs: Iterable[TrainingRun], table: str) -> None:
    """Write the error to expect, from the table of runs held out, and the range of the runs."""
    rows = re.findall(
        r"^\| (dense|experts), (.*?) \| \d+ \| ([\d.]+) % \| (\d+) %", table, re.M
    )
    expected = "".join(
        f"    ({kind == 'experts'}, {name == 'FP8'}): "
        f"({float(median) / 100:.3f}, {int(most) / 100:.2f}),\n"
        for kind, name, median, most in rows
    )
    usual = [covered(price_run(run, Constants()).price) for run in runs if run.is_usable]
    ranges = ""
    for name in usual[0]:
        scale = 100 if name == "mfu" else 1
        values = [each[name] * scale for each in usual]
        low, high = np.floor(min(values)) / scale, np.ceil(max(values)) / scale
        ranges += f'    "{name}": ({low:g}, {high:.10g}),\n'
    text = EVALUATION.read_text("utf-8")
    for name, lines in (("EXPECTED", expected), ("COVERED", ranges)):
        block = re.compile(rf"^{name} = {{\n.*?^}}\n", re.M | re.S)
        text = block.sub(lambda _, n=name, body=lines: f"{n} = {{\n{body}}}\n", text)
    EVALUATION.write_text(text, "utf-8")


def page(folder: Path) -> str:
    """The whole page; writes the error to expect, too."""
    runs = load(folder).runs
    unseen = held_out(runs)
    write_expected(runs, unseen)
    rows = vouched(runs)
    iterations = folder.parent / "isp" / "vtrain_single.csv"
    single, regret, jobs = single_node(node_jobs(iterations))
    plain, plain_regret, _ = single_node(node_jobs(iterations, 1.0))
    factors, *judged = factor_held_out(iterations)
    text = _ORDER.format(
        *(100 * share for share in (single, regret, plain, plain_regret, *judged)),
        order=order(rows),
        fits=sum(row.price.fits for row in rows),
        runs=len(rows),
        groups=jobs,
        models=len(factors),
        factors=" or ".join(f"{factor:.2f}" for factor in sorted(set(factors))),
    )
    parts = [_HEAD, _GROUPS, groups(runs), _CLASSES, classes(rows), text, _HELD_OUT, unseen]
    parts += [_CONSTANTS, constants(), _LEFT_OUT, left_out(runs)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), "utf-8")
