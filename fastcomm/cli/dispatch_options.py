"""Options that the commands of ``fastcomm dispatch`` share, and the object they get them as."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.checks import EFFICIENCY, FACTOR, START_S
from fastcomm.cli.messages import say
from fastcomm.cli.options import BYTES, Number, builds, with_options
from fastcomm.cli.results import ResultFiles, print_json, result_options
from fastcomm.dispatch import DTYPE_BYTES, LAWS, RANGES, Recipe
from fastcomm.options import DispatchOptions, WorkloadOptions

if TYPE_CHECKING:
    from fastcomm.dispatch.placement import PlacementResult
    from fastcomm.dispatch.schedules import Terms
    from fastcomm.dispatch.simulation import DispatchSweep, Simulation

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", "Simulation", "PlacementResult", "DispatchSweep")

_SHAPE = {
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
_TERMS = (
    click.option(
        "--cluster",
        metavar="NAME|FILE",
        help="Cluster whose bandwidths count: a shipped one (h100) or a TOML file, as of "
        "fastcomm isp.",
    ),
    click.option(
        "--bw-inter",
        "--bw_inter",
        "bw_inter",
        metavar="RATE",
        help="NIC bandwidth of a GPU: 50GB/s, 400Gbit/s. [default: 50GiB/s]",
    ),
    click.option(
        "--bw-intra",
        "--bw_intra",
        "bw_intra",
        metavar="RATE",
        help="Bandwidth of a GPU inside its node. [default: 400GiB/s]",
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
            help=f"{words} [default: {getattr(Recipe(), name)}]" if defaults else words,
        )
        for name, words in _SHAPE.items()
    ]
    dtype = click.option(
        "--dtype", type=click.Choice(list(DTYPE_BYTES)), help="Type of the elements."
    )
    return (*whole, dtype)


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
        type=click.Choice(LAWS),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What every command that simulates is asked: a workload's shape, links, and files."""

    shape: WorkloadOptions
    network: DispatchOptions
    results: ResultFiles

    def terms(self, recipe: Recipe) -> "Terms":
        """Return the terms of a simulation of a workload."""
        from fastcomm.analyses.dispatch import terms_for

        return terms_for(recipe, self.network)

    def give(self, result: R, show: Callable[[R], None]) -> None:
        """Write the page and the files that were asked for, and print the result."""
        if self.results.html is not None:
            from fastcomm.report.html import dispatch as pages
            from fastcomm.report.html import write as write_page

            write_page(pages.page(result), self.results.html)
        if self.results.output is not None:
            from fastcomm.report.dispatch import write_dispatch

            paths = write_dispatch(result, self.results.output, xlsx=self.results.xlsx)
            say(*(f"wrote {path}" for path in paths))
        if self.results.as_json:
            print_json(result)
        else:
            show(result)


def simulates(*, draws: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a command that simulates.

    The command gets a `SimulationRequest` as `request`. One that `draws` a workload takes the
    options of drawing, too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(
            *,
            shape: WorkloadOptions,
            network: DispatchOptions,
            results: ResultFiles,
            **values: Any,
        ) -> None:
            request = SimulationRequest(shape=shape, network=network, results=results)
            command(request=request, **values)

        kinds = {"shape": WorkloadOptions, "network": DispatchOptions, "results": ResultFiles}
        files = result_options("Write dispatch.json, and the table as CSV and Parquet.")
        drawing = DRAWING if draws else ()
        options = (*shape_options(defaults=draws), *drawing, *_TERMS, files)
        return with_options(options)(builds(**kinds)(call))

    return decorate
