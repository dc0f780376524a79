"""Predicted beside measured training runs: writes `docs/isp-runs.md`.

It also writes the error to expect and the range of these runs into
`fastcomm/isp/evaluation.py`. The runs lie outside of the repository:
`python docs/isp_runs.py FOLDER` reads `runs.csv` and `models.csv` there.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fastcomm.hardware.surfaces import gpu
from fastcomm.isp.evaluation import covered
from fastcomm.isp.plan_cost import CALIBRATED, Constants
from fastcomm.isp.run_calibration import held_out_errors
from fastcomm.isp.runs import (
    GroupError,
    RunTable,
    TrainingRun,
    errors,
    is_fp8,
    load_runs,
    price_run,
)
from fastcomm.isp.tables import load_models

PAGE = Path(__file__).with_name("isp-runs.md")
EVALUATION = Path(__file__).parents[1] / "fastcomm" / "isp" / "evaluation.py"
# Values before any fit, from what such systems usually reach: where cross-validation begins.
NEUTRAL = Constants(
    network_share=0.8,
    overlap_loss=0.2,
    tp_exposed=0.7,
    elementwise=1.5,
    gemm_slowdown=1.05,
    host_layer_s=0.9e-3,
    host_experts=8,
    experts_slowdown=1.5,
    step_s=20e-3,
)
_HEAD = """\
# Fixed strategies: how far off

How far are predictions of `fastcomm isp price` and `fastcomm isp evaluate` from measured runs?
This page is for readers who plan a cluster by them. `docs/isp_runs.py` compares 305 published
runs, whose tables are not part of fastcomm, with predictions in tokens/s/GPU. Runs that their
sources call traced, tests or regressions do not count. One row (r326) divides experts over
64 ranks where a pipeline stage has 32, which Megatron refuses: it is priced all the same.

GPUs marked "not measured" are priced by kernels of a similar one.

Rules without a constant, such as which attention kernel a year has, were chosen with all of
these runs in view. So the errors on runs held out are those of the constants, not of the rules.
"""
_GROUPS = """\
## All runs

Median and 90th percentile of absolute errors, and the median error (above 0 is too fast), with
the shipped constants, which were fitted to these runs. In `memory` is the median absolute error
of the memory, where the source has it. In `no fit` are runs that ran, but
were predicted not to fit."""
_HELD_OUT = """\
## Runs that the constants have not seen

Five times, the constants are fitted to four fifths of the pairs of source and model, and judged
on the others. These are the errors to expect of your own runs; each prediction carries those of
its row."""
_CONSTANTS = """\
## Constants

Everything else comes from data sheets and measured kernels. Fitted constants started from the
value on the left; `--calibrate-from` fits them to runs of your own."""
_MEANING = {
    "network_share": "share of the bandwidth between nodes that collectives reach",
    "overlap_loss": "share of the shorter of two overlapped parts that is lost",
    "tp_exposed": "share of tensor-parallel communication that nothing overlaps",
    "elementwise": "bytes moved by element-wise kernels, over fused ones",
    "gemm_slowdown": "time of a GEMM in a step, over the kernel alone",
    "host_layer_s": "time of the host to launch a layer, both passes, in s",
    "host_experts": "that of a layer of experts, over a dense one",
    "experts_slowdown": "time of a layer of experts in a trainer, over a fused one",
    "step_s": "time of the host outside of layers, in s",
}


def _table(head: Sequence[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def load(folder: Path) -> RunTable:
    """The runs of a folder, and those that cannot be priced."""
    return load_runs(folder / "runs.csv", load_models(folder / "models.csv"))


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
        if name in CALIBRATED
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
    parts = [_HEAD, _GROUPS, groups(runs), _HELD_OUT, unseen, _CONSTANTS, constants()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), "utf-8")
