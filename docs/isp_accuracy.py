"""What the strategy search predicts beside what was published: writes `docs/isp-accuracy.md`.

The measurements lie outside of the repository: `python docs/isp_accuracy.py FOLDER` reads
`published_measurements.csv` and `vtrain_multi.csv` there.
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastcomm.cluster.cluster import Cluster
from fastcomm.cluster.load import load
from fastcomm.isp.block import Block
from fastcomm.isp.measured import evaluate
from fastcomm.isp.model import Model
from fastcomm.isp.presets import of_size
from fastcomm.isp.question import Batch, Question

PAGE = Path(__file__).with_name("isp-accuracy.md")
ANY = Batch(least=1, most=1 << 50)
_GIB = 2**30
_HEAD = """\
# Strategy search: how far off

What `fastcomm isp` predicts, beside what others measured and published. No constant was fitted
to the throughputs below: links are those of hardware sheets and of measured NCCL collectives,
curves those of measured products and attention calls. `docs/isp_accuracy.py` writes this page.
The mean error (MAPE) is that of absolute relative errors.
"""


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
    block = Block.one(
        world=world,
        algo="msp",
        pp=pp,
        sp=tp,
        bsz=int(row["micro_bsz"]),
        num=int(row["micro_num"]),
        ck=int(row["ckpt"]),
        shards=(zero,) * 3 if row["fsdp"] == "1" else (1, 1, zero),
    )
    return evaluate(block, _asked(of_size(float(row["model"][:-1])), row), cluster)


def _asked(model: Model, row: dict[str, str]) -> Question:
    return Question(
        model=model, world_sizes=(int(row["gpus"]),), seq_len=int(row["seq_len"]), batch=ANY
    )


def vtrain(folder: Path, intra: int) -> list[tuple[float, float]]:
    """Measured and predicted milliseconds of vTrain's iterations; `intra` in GiB/s."""
    path = folder / "vtrain_multi.csv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    cluster = replace(load("a100"), bw_node=100 * _GIB, bw_intra=intra * _GIB)
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
        asked = Question(
            model=model, world_sizes=(world,), seq_len=seq_len, batch=ANY, flash=False
        )
        num = batch // dp // bsz
        block = Block.one(world=world, algo="mtp", pp=pp, sp=tp, bsz=bsz, num=num, ck=1)
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
    asked = Question(
        model=of_size(7),
        world_sizes=(world,),
        seq_len=seq_len,
        batch=ANY,
        overlap_grad=overlap_grad,
    )
    block = Block.one(
        world=world, algo=algo, sp=sp, bsz=pair[0], num=pair[1], shards=(1, 1, states)
    )
    return evaluate(block, asked, load("a800"))["mfu"]


def errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean absolute error, lowest and highest, of (measured, predicted)."""
    off = np.array([mine / measured - 1 for measured, mine in pairs])
    return float(np.abs(off).mean()), float(off.min()), float(off.max())


def _said(pairs: Sequence[tuple[float, float]]) -> str:
    mean, low, high = errors(pairs)
    return f"MAPE {mean:.1%}, from {low:+.1%} to {high:+.1%}."


def _throughput(folder: Path, table: str) -> list[str]:
    rows = published(folder, table, "tgs")
    pairs = [(float(row["value"]), priced(row, load("a100"))["tgs"]) for row in rows]
    lines: dict[str, dict[int, str]] = {}
    for row, (measured, mine) in zip(rows, pairs, strict=True):
        checkpoint = "checkpoints, " if row["ckpt"] == "1" else ""
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
            "zp 8, b 1, m 1; gradients exposed, hidden",
        ],
        ["128 GPUs, 256K", "88 %", f"{long:.1%}", "ISP, sp 32, zp 16, b 1, m 4"],
    ]
    return _table(["", "report", "predicted", "strategy assumed"], rows)


def page(folder: Path) -> str:
    """The whole page."""
    parts = [
        _HEAD,
        "## InternLM-7B on A100, 8 to 1024 GPUs",
        "Source: InternEvo, `doc/en/train_performance.md` (Apache-2.0): sequences of 2048, "
        "four 100 Gbit/s ports a node. Measured / predicted tokens a GPU and second.",
        "\n".join(_throughput(folder, "A")),
        "The same with packed samples:",
        "\n".join(_throughput(folder, "B")),
        "## Memory on A800",
        "Source: the same; checkpoints, b 1, m 4. Its GB are taken for GiB. One constant, the "
        "16 bytes a parameter that the optimizer's step needs for a moment, was fitted here.",
        "\n".join(_memory(folder)),
        "## Megatron-DeepSpeed on 64 to 512 A100",
        "Source: vTrain (KAIST, MIT licence), 109 iterations of models from 3.6 to 175 billion "
        "parameters, full recomputation, unfused attention.",
        f"- With 250 GiB/s in a node, the sheet's NVLink: {_said(vtrain(folder, 250))}",
        f"- With 150 GiB/s, as NCCL reached on A800: {_said(vtrain(folder, 150))}",
        "## The MFUs of the InternLM2 report",
        "Source: arXiv 2403.17297, section 2.1; 7B, batch of 4 Mi tokens. Its configurations "
        "are not published, so these are likely ones, on A800.",
        "\n".join(_report()),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), "utf-8")
