"""Options that the commands of ``fastcomm dispatch`` share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fastcomm.checks import EFFICIENCY, FACTOR, START_S
from fastcomm.cli.options import BYTES, Number
from fastcomm.cli.results import result_options
from fastcomm.dispatch.recipe import RANGES

F = TypeVar("F", bound=Callable[..., Any])

_LAWS = ("zipf", "bounded", "uniform", "popularity", "gate", "bimodal")
SHAPE = {
    "num_nodes": "Nodes.",
    "gpus_per_node": "GPUs of a node, each with a NIC.",
    "experts_per_gpu": "Experts of a GPU.",
    "seq_len": "Tokens of a sequence.",
    "batch_size": "Sequences; a layer has seq-len * batch-size tokens in all.",
    "embed_size": "Elements of a token.",
    "topk": "Experts of a token.",
    "num_layers": "Layers of an iteration.",
    "iter_num": "Iterations.",
}
_DEFAULTS = ["4", "8", "2", "8192", "2", "5120", "4", "1", "10"]
_DTYPES = ["float16", "bfloat16", "float32", "float64", "float8"]
REPORT = (result_options("Write dispatch.json, and the table as CSV and Parquet."),)
TERMS = (
    click.option(
        "--cluster",
        metavar="FILE",
        help="TOML file of a cluster, as of fastcomm isp, or the name of a shipped one: its "
        "bandwidths.",
    ),
    click.option(
        "--bw-inter",
        "--bw_inter",
        "bw_inter",
        metavar="RATE",
        help="NIC bandwidth of a GPU, as 50GB/s or 400Gbit/s; a bare number counts GiB/s. "
        "[default: 50]",
    ),
    click.option(
        "--bw-intra",
        "--bw_intra",
        "bw_intra",
        metavar="RATE",
        help="Bandwidth of a GPU inside its node. [default: 400]",
    ),
    click.option(
        "--inter-efficiency", type=Number(EFFICIENCY), default=1.0, help="Share of it reached."
    ),
    click.option(
        "--intra-efficiency", type=Number(EFFICIENCY), default=1.0, help="Share of it reached."
    ),
    click.option(
        "--inter-start",
        type=Number(START_S, unit=1e-6),
        default=0.0,
        help="Start-up of a message, in us.",
    ),
    click.option(
        "--intra-start",
        type=Number(START_S, unit=1e-6),
        default=0.0,
        help="Start-up of a message, in us.",
    ),
    click.option(
        "--incast",
        type=Number(FACTOR),
        default=0.0,
        help="A receiver is slower by this share for each sender beyond the first (direct).",
    ),
    click.option("--token-bytes", type=BYTES, help="Bytes of a dispatched token."),
    click.option("--combine-bytes", type=BYTES, help="Bytes of a returned token."),
    click.option(
        "--demand",
        type=click.Choice(["copies", "unique"]),
        default="copies",
        show_default=True,
        help="What fast, direct, spreadout and hierarchical move: all copies, or one a GPU.",
    ),
    click.option(
        "--decomposition",
        type=click.Choice(["threshold", "incremental", "assignment"]),
        default="threshold",
        show_default=True,
        help="How fast finds its stages.",
    ),
)


def _whole(name: str) -> click.IntRange:
    """Return the type of an option of the recipe that is a whole number."""
    return click.IntRange(int(RANGES[name].least), int(RANGES[name].most))


def shape_options(defaults: bool) -> tuple[Callable[[F], F], ...]:
    """The options of the shape, named as the original's; underscores are taken as well."""
    whole = [
        click.option(
            *dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}", name]),
            type=_whole(name),
            help=f"{words} [default: {default}]" if defaults else words,
        )
        for (name, words), default in zip(SHAPE.items(), _DEFAULTS, strict=True)
    ]
    return (
        *whole,
        click.option("--dtype", type=click.Choice(_DTYPES), help="Type of the elements."),
    )


DRAWING = (
    click.option(
        "--zipf-alpha",
        "--zipf_alpha",
        "zipf_alpha",
        type=Number(RANGES["zipf_alpha"]),
        help="Exponent.",
    ),
    click.option("--seed", type=_whole("seed"), help="Random seed. [default: 0]"),
    click.option(
        "--compat",
        type=click.Choice(["seed"]),
        help="Draw exactly what the original simulator draws from this random seed.",
    ),
    click.option(
        "--law",
        type=click.Choice(_LAWS),
        help="How popular experts are: unbounded Zipf folded onto them, bounded Zipf, all "
        "alike, a table, DeepSeek-V3's group-limited gate, or ranks that send mostly "
        "away. [default: zipf]",
    ),
    click.option(
        "--distinct",
        type=click.Choice(["uniform", "resample"]),
        help="What replaces a repeated expert of a token: any, or one by the law.",
    ),
    click.option("--shuffle", is_flag=True, default=None, help="Hot experts anywhere."),
)
