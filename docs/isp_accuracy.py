"""What the strategy search predicts beside what was published: writes `docs/isp-accuracy.md`.

The measurements lie outside of the repository: `python docs/isp_accuracy.py FOLDER` reads
`published_measurements.csv` and `vtrain_multi.csv` there.
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastcomm.hardware.clusters import Cluster, load
from fastcomm.isp.price import evaluate
from fastcomm.isp.problem import MicroBatchRule, SearchProblem
from fastcomm.isp.space import StrategyGrid
from fastcomm.models import PRESETS, Experts, Model, internlm

PAGE = Path(__file__).with_name("isp-accuracy.md")
ANY = MicroBatchRule(least=1, most=1 << 50)
_GIB = 2**30
_HEAD = """\
# Sequence parallelism: how far off

How accurate are the predictions of `fastcomm isp`? This page compares them with published
measurements, for readers who choose a strategy by them. No constant was fitted to the
throughputs below: links come from data sheets and measured NCCL collectives, curves from
measured GEMMs and attention calls. The mean error (MAPE) is the mean
of absolute relative errors. `docs/isp_accuracy.py` writes this page.
"""
_MIXTURES = """\
Sources: arXiv 2412.19437, section 1, and the performance summary of NVIDIA's Megatron Bridge
(releases 25.09 and 26.02: routing forced to be even, no token dropped). Tokens per second and
GPU, in sequences of 4096. Predictions are for bf16, on the curves of H100. In `copies` a
token is sent to each of its experts, in `by node` once to each node (`--dispatch nodes`);
`overlapped` also overlaps the all-to-alls with another micro-batch (`--overlap-experts`).

DeepSeek's own run is 14 % faster than the nearest prediction: it computes and dispatches in
fp8, and overlaps all-to-alls. Predictions for models with many small experts are far too
fast, more so for smaller experts: the time of a grouped GEMM is taken as the time of one GEMM
with equal FLOPs, and kernel launches, routing and permutation cost only the bytes that they
touch. For such models, first replace the curve by measured GEMMs (`--calibrate`,
`--gemm-table`)."""


def published(folder: Path, table: str, metric: str) -> list[dict[str, str]]:
    """The rows of one published table."""
    with (folder / "published_measurements.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if (row["table"], row["metric"]) == (table, metric)]


def priced(row: dict[str, str], cluster: Cluster) -> dict[str, float]:
    """A published row as the search prices it."""
    world, tp, pp = (int(row[name]) for name in ("gpus", "tp", "pp"))
    dp = world // tp // pp
    zero = dp if row["zero1"] == "-1" else int(row["zero1"])
    block = StrategyGrid.one(
        world=world,
        algo="msp",
        pp=pp,
        sp=tp,
        bsz=int(row["micro_bsz"]),
        num=int(row["micro_num"]),
        recompute=int(row["ckpt"]),
        shards=(zero,) * 3 if row["fsdp"] == "1" else (1, 1, zero),
    )
    return evaluate(block, _asked(internlm(float(row["model"][:-1])), row), cluster)


def _asked(model: Model, row: dict[str, str]) -> SearchProblem:
    return SearchProblem(
        model=model, world_sizes=(int(row["gpus"]),), seq_len=int(row["seq_len"]), batch=ANY
    )


def vtrain(folder: Path, intra: int, p2p: str = "scatter") -> list[tuple[float, float]]:
    """Measured and predicted milliseconds of vTrain's iterations; `intra` in GiB/s.

    Stages exchange what `p2p` says: Megatron-LM and DeepSpeed send a share a rank.
    """
    path = folder / "vtrain_multi.csv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    cluster = replace(load("a100-roce"), bw_node=100 * _GIB, bw_intra=intra * _GIB)
    found = []
    for row in rows:
        world, batch, bsz, hidden, heads, layers, seq_len, tp, dp, pp = map(int, row[1:11])
        model = Model(
            name="gpt",
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            layers=layers,
            ffn=4 * hidden,
            vocab=51200,
            mlp="gelu",
        )
        asked = SearchProblem(
            model=model,
            world_sizes=(world,),
            seq_len=seq_len,
            batch=ANY,
            flash=False,
            p2p=p2p,
        )
        num = batch // dp // bsz
        block = StrategyGrid.one(
            world=world, algo="mtp", pp=pp, sp=tp, bsz=bsz, num=num, recompute=1
        )
        mine = evaluate(block, asked, cluster)["total_latency"] * 1e3
        found.append((float(row[11]), mine))
    return found


def mfu(
    world: int,
    seq_len: int,
    algo: str,
    *,
    sp: int = 1,
    pair: tuple[int, int] = (1, 1),
    states: int = 8,
    overlap_grad: bool = False,
) -> float:
    """MFU of the 7B model on A800."""
    asked = SearchProblem(
        model=internlm(7),
        world_sizes=(world,),
        seq_len=seq_len,
        batch=ANY,
        overlap_grad=overlap_grad,
    )
    block = StrategyGrid.one(
        world=world, algo=algo, sp=sp, bsz=pair[0], num=pair[1], shards=(1, 1, states)
    )
    return evaluate(block, asked, load("a800"))["mfu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A published throughput of a model with experts; sequences of 4096."""

    what: str
    source: str
    model: Model
    cluster: str
    world: int
    tp: int
    pp: int
    virtual: int
    ep: int
    sequences: int
    micro_bsz: int
    tgs: float


_GPT_OSS = Model(  # config.json of openai/gpt-oss-120b; its sliding windows are left out
    name="gpt-oss-120b",
    hidden=2880,
    heads=64,
    kv_heads=8,
    layers=36,
    ffn=2880,
    vocab=201088,
    head_dim=64,
    experts=Experts(number=128, top_k=4, ffn=2880),
)
_BRIDGE = "Megatron Bridge"


def _bridge(what: str, model: Model, numbers: tuple[int, ...], tgs: float) -> Mixture:
    names = ("world", "tp", "pp", "virtual", "ep", "sequences", "micro_bsz")
    shape = dict(zip(names, numbers, strict=True))
    return Mixture(what=what, source=_BRIDGE, model=model, cluster="h100", tgs=tgs, **shape)


MIXTURES = (
    Mixture(
        what="DeepSeek-V3, H800, fp8",
        source="its report: 180 K GPU hours for 10^12 tokens",
        model=PRESETS["deepseek-v3"],
        cluster="h800",
        world=2048,
        tp=1,
        pp=16,
        virtual=1,
        ep=64,
        sequences=15360,
        micro_bsz=1,
        tgs=1e12 / (180e3 * 3600),
    ),
    _bridge(
        "DeepSeek-V3, H100, fp8", PRESETS["deepseek-v3"], (1024, 2, 8, 4, 64, 8192, 1), 1297
    ),
    _bridge(
        *("Qwen3-235B-A22B, H100, fp8", PRESETS["qwen3-235b-a22b"]),
        *((256, 2, 8, 4, 32, 8192, 1), 1633),
    ),
    _bridge("GPT-OSS-120B, H100, bf16", _GPT_OSS, (64, 1, 4, 1, 8, 1280, 1), 5993),
    _bridge(
        "Qwen3-30B-A3B, H100, fp8", PRESETS["qwen3-30b-a3b"], (16, 1, 2, 12, 8, 1024, 1), 5113
    ),
)


def mixture(row: Mixture, dispatch: str = "nodes", *, hidden: bool = False) -> float:
    """Tokens a GPU and second that the search predicts, in bf16; `hidden`: all-to-alls are."""
    dp = row.world // row.tp // row.pp
    block = StrategyGrid.one(
        world=row.world,
        algo="msp",
        pp=row.pp,
        sp=row.tp,
        bsz=row.micro_bsz,
        num=row.sequences // dp // row.micro_bsz,
        shards=(1, 1, dp),
        ep=row.ep,
        interleave=row.virtual,
    )
    asked = SearchProblem(
        model=row.model,
        world_sizes=(row.world,),
        seq_len=4096,
        batch=ANY,
        dispatch=dispatch,
        overlap_experts=hidden,
    )
    return evaluate(block, asked, load(row.cluster))["tgs"]


def errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean absolute error, lowest and highest, of (measured, predicted)."""
    off = np.array([mine / measured - 1 for measured, mine in pairs])
    return float(np.abs(off).mean()), float(off.min()), float(off.max())


def _said(pairs: Sequence[tuple[float, float]]) -> str:
    mean, low, high = errors(pairs)
    return f"MAPE {mean:.1%}, from {low:+.1%} to {high:+.1%}."


def _throughput(folder: Path, table: str) -> list[str]:
    rows = published(folder, table, "tgs")
    pairs = [(float(row["value"]), priced(row, load("a100-roce"))["tgs"]) for row in rows]
    lines: dict[str, dict[int, str]] = {}
    for row, (measured, mine) in zip(rows, pairs, strict=True):
        checkpoint = "full recompute, " if row["ckpt"] == "1" else ""
        name = (
            f"tp {row['tp']}, zero1 {row['zero1']}, {checkpoint}"
            f"b {row['micro_bsz']}, m {row['micro_num']}"
        )
        lines.setdefault(name, {})[int(row["gpus"])] = f"{measured:.0f} / {mine:.0f}"
    worlds = sorted({int(row["gpus"]) for row in rows})
    return [
        *_table(
            ["", *map(str, worlds)],
            [
                [name, *(cells.get(world, "") for world in worlds)]
                for name, cells in lines.items()
            ],
        ),
        "",
        _said(pairs),
    ]


def _memory(folder: Path) -> list[str]:
    rows = published(folder, "M", "memory")
    cells, pairs = [], []
    for row in rows:
        mine = priced(row, load("a800"))["total_mm_cost"] / _GIB
        pairs.append((float(row["value"]), mine))
        shards = "all three" if row["fsdp"] == "1" else "states"
        name = [row["model"], row["gpus"], row["tp"], row["pp"], shards, row["value"]]
        cells.append([*name, f"{mine:.1f}"])
    head = ["model", "GPUs", "tp", "pp", "sharded", "measured GB", "predicted GiB"]
    return [*_table(head, cells), "", _said(pairs)]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def _report() -> list[str]:
    exposed, hidden = (mfu(1024, 4096, "msp", overlap_grad=each) for each in (False, True))
    long = mfu(128, 256 * 1024, "isp", sp=32, pair=(1, 4), states=16)
    rows = [
        ["8 GPUs, 4K", "64 %", f"{mfu(8, 4096, 'msp', pair=(2, 64)):.1%}", "zp 8, b 2, m 64"],
        [
            "1024 GPUs, 4K",
            "53 %",
            f"{exposed:.1%} to {hidden:.1%}",
            "zp 8, b 1, m 1; gradients exposed, overlapped",
        ],
        ["128 GPUs, 256K", "88 %", f"{long:.1%}", "ISP, sp 32, zp 16, b 1, m 4"],
    ]
    return _table(["", "report", "predicted", "strategy assumed"], rows)


def _mixtures() -> list[str]:
    rows = []
    for row in MIXTURES:
        found = (
            mixture(row, "copies"),
            mixture(row),
            mixture(row, hidden=True),
        )
        shape = f"{row.world}; tp {row.tp} pp {row.pp} v {row.virtual} ep {row.ep}"
        cells = [f"{each:.0f} ({each / row.tgs - 1:+.0%})" for each in found]
        rows.append([row.what, row.source, shape, f"{row.tgs:.0f}", *cells])
    head = ["", "source", "GPUs and degrees", "measured", "copies", "by node", "overlapped"]
    return _table(head, rows)


def page(folder: Path) -> str:
    """The whole page."""
    parts = [
        _HEAD,
        "## InternLM-7B on A100, 8 to 1024 GPUs",
        "Source: InternEvo, `doc/en/train_performance.md` (Apache-2.0): sequences of 2048, "
        "four 100 Gbit/s ports per node. Measured / predicted tokens per second and GPU.",
        "\n".join(_throughput(folder, "A")),
        "With packed samples:",
        "\n".join(_throughput(folder, "B")),
        "## Memory on A800",
        "Source: InternEvo, as above; full recompute, b 1, m 4. Its GB are taken as GiB. One "
        "constant, the 16 bytes per parameter that the optimizer step needs temporarily, was "
        "fitted here.",
        "\n".join(_memory(folder)),
        "## Megatron-DeepSpeed on 64 to 512 A100",
        "Source: vTrain (KAIST, MIT license), 109 iterations of models from 3.6 to 175 billion "
        "parameters, full recomputation, unfused attention.",
        "Each rank of a stage sends a share of its output, as DeepSpeed's pipeline does with "
        "tensor parallelism (`--p2p scatter`), and the receivers gather it.",
        f"- With 250 GiB/s in a node, from NVLink's data sheet: {_said(vtrain(folder, 250))}",
        f"- With 150 GiB/s, as NCCL reached on A800: {_said(vtrain(folder, 150))}",
        "- With 150 GiB/s, where each rank sends the whole output, the default of the search: "
        f"{_said(vtrain(folder, 150, 'whole'))}",
        "## The MFUs of the InternLM2 report",
        "Source: arXiv 2403.17297, section 2.1; 7B, batch of 4 Mi tokens. Its configurations "
        "are not published, so plausible ones are assumed, on A800.",
        "\n".join(_report()),
        "## Models with experts",
        _MIXTURES,
        "\n".join(_mixtures()),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), "utf-8")
