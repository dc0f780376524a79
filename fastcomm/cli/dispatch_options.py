"""Options that the commands of ``fastcomm dispatch`` share, and the object they get them as."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click
from cloup import OptionGroup

from fastcomm.checks import EFFICIENCY, FACTOR, literals, option_name
from fastcomm.cli.commands import WORKLOAD, of_field, option
from fastcomm.cli.messages import say
from fastcomm.cli.options import builds, with_options
from fastcomm.cli.results import (
    ResultFiles,
    cluster_option,
    compat_option,
    print_json,
    result_options,
)
from fastcomm.cli.values import BYTES, Duration, Number
from fastcomm.dispatch import DTYPE_BYTES, LAWS, RANGES, Recipe
from fastcomm.options import DispatchOptions, WorkloadOptions

if TYPE_CHECKING:
    from fastcomm.dispatch.placement import PlacementResult
    from fastcomm.dispatch.schedules import Terms
    from fastcomm.dispatch.simulation import Simulation
    from fastcomm.dispatch.sweeps import DispatchSweep

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", "Simulation", "PlacementResult", "DispatchSweep")

_SHAPE = {
    "num_nodes": "Number of nodes.",
    "gpus_per_node": "GPUs per node.",
    "experts_per_gpu": "Experts per GPU.",
    "seq_len": "Sequence length in tokens.",
    "batch_size": "Number of sequences in a layer.",
    "embed_size": "Elements per token.",
    "topk": "Experts per token.",
    "num_layers": "Layers per iteration.",
    "iter_num": "Number of iterations.",
}
_COMMON_SHAPE = ("num_nodes", "seq_len", "topk", "iter_num")
_NETWORK = OptionGroup("Network")


def _network(
    *names: str, metavar: str, help_: str, **attrs: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option of the group on the network; `attrs` are those of click."""
    return option(*names, metavar=metavar, group=_NETWORK, help=help_, **attrs)


_TERMS = (
    cluster_option("none"),
    _network(
        "--bw-inter",
        metavar="RATE",
        is_common=True,
        help_="NIC bandwidth per GPU, as in 50GB/s or 400Gbit/s. Default: 50GiB/s.",
    ),
    _network(
        "--bw-intra",
        metavar="RATE",
        is_common=True,
        help_="Bandwidth per GPU inside its node. Default: 400GiB/s.",
    ),
    _network(
        "--inter-efficiency",
        type=Number(EFFICIENCY),
        metavar="FACTOR",
        default=1.0,
        help_="Share of --bw-inter that is reached.",
    ),
    _network(
        "--intra-efficiency",
        type=Number(EFFICIENCY),
        metavar="FACTOR",
        default=1.0,
        help_="Share of --bw-intra that is reached.",
    ),
    _network(
        "--inter-start",
        type=Duration(),
        metavar="TIME",
        default="0us",
        help_="Startup time of a message between nodes, as in 2us.",
    ),
    _network(
        "--intra-start",
        type=Duration(),
        metavar="TIME",
        default="0us",
        help_="Startup time of a message inside a node, as in 2us.",
    ),
    _network(
        "--incast",
        type=Number(FACTOR),
        metavar="FACTOR",
        default=0.0,
        needs=("--schedules direct",),
        help_="Slowdown of a receiver per sender beyond the first (with --schedules direct).",
    ),
    _network("--token-bytes", type=BYTES, metavar="N", help_="Bytes of a dispatched token."),
    _network("--combine-bytes", type=BYTES, metavar="N", help_="Bytes of a returned token."),
    option(
        "--demand",
        **of_field(DispatchOptions, "demand"),
        group=_NETWORK,
        needs=tuple(
            f"--schedules {name}" for name in ("fast", "direct", "spreadout", "hierarchical")
        ),
        help="Send a GPU one copy of a token for each of its experts, or a single one.",
    ),
    option(
        "--decomposition",
        **of_field(DispatchOptions, "decomposition"),
        metavar="METHOD",
        group=_NETWORK,
        needs=("--schedules fast",),
        help="How --schedules fast picks its stages: threshold, incremental or assignment.",
    ),
)


def _whole(name: str) -> click.IntRange:
    """Return the type of an option of the recipe that is a whole number."""
    return click.IntRange(int(RANGES[name].least), int(RANGES[name].most))


def shape_options(defaults: bool) -> tuple[Callable[[F], F], ...]:
    """Return the options of the shape.

    `defaults` adds the default of each to its help text.
    """
    whole = [
        option(
            option_name(name),
            type=_whole(name),
            group=WORKLOAD,
            is_common=name in _COMMON_SHAPE,
            help=f"{text} Default: {getattr(Recipe(), name)}." if defaults else text,
        )
        for name, text in _SHAPE.items()
    ]
    dtype = option(
        "--dtype",
        **of_field(WorkloadOptions, "dtype"),
        metavar="NAME",
        group=WORKLOAD,
        help=f"Type of the elements: {', '.join(DTYPE_BYTES)}.",
    )
    return (*whole, dtype)


DRAWING = (
    option(
        "--zipf-alpha",
        type=Number(RANGES["zipf_alpha"]),
        metavar="FACTOR",
        group=WORKLOAD,
        is_common=True,
        help="Exponent of the Zipf law.",
    ),
    option("--seed", type=_whole("seed"), group=WORKLOAD, help="Random seed. Default: 0."),
    compat_option(
        *literals(WorkloadOptions, "compat"), of="the workload of the original simulator"
    ),
    option(
        "--law",
        **of_field(WorkloadOptions, "law"),
        metavar="NAME",
        group=WORKLOAD,
        is_common=True,
        help=f"How popular experts are: {', '.join(LAWS)}. Default: zipf.",
    ),
    option(
        "--distinct",
        **of_field(WorkloadOptions, "distinct"),
        group=WORKLOAD,
        help="How a repeated expert of a token is replaced: by any other, or by the law.",
    ),
    option(
        "--shuffle",
        is_flag=True,
        default=None,
        group=WORKLOAD,
        help="Randomize which experts are popular.",
    ),
)


def strategy_option(default: str) -> Callable[[F], F]:
    """Return the option of the schedules to simulate."""
    return option(
        "--schedules",
        "names",
        default=default,
        metavar="LIST",
        group=_NETWORK,
        is_common=True,
        help="Schedules of the all-to-all to simulate.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What every command that simulates is asked: a workload's shape, links, and files."""

    shape: WorkloadOptions
    network: DispatchOptions
    results: ResultFiles

    def terms(self, recipe: Recipe) -> "Terms":
        """Return links, sizes and demand for the simulation of a workload."""
        from fastcomm.analyses.dispatch import terms_for

        return terms_for(recipe, self.network)

    def give(self, result: R, show: Callable[[R], None]) -> None:
        """Print the result with `show`, or as JSON; write --html and --output."""
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
        files = result_options("dispatch.json, and the table as CSV and Parquet")
        drawing = DRAWING if draws else ()
        options = (*shape_options(defaults=draws), *drawing, *_TERMS, files)
        return with_options(options)(builds(**kinds)(call))

    return decorate
