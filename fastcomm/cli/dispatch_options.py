"""Options that the commands of ``fastcomm dispatch`` share, and the object they get them as."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.checks import EFFICIENCY, FACTOR
from fastcomm.cli.commands import option, option_of
from fastcomm.cli.messages import say
from fastcomm.cli.parameter_types import BYTES, DURATION, Number
from fastcomm.cli.results import ResultFiles, compat_option, print_json, result_options
from fastcomm.cli.shared_options import builds, cluster_option, with_options
from fastcomm.dispatch import DTYPE_BYTES, LAWS, RANGES, Recipe
from fastcomm.option_fields import WORKLOAD
from fastcomm.planning_options import DispatchOptions, WorkloadOptions

if TYPE_CHECKING:
    from fastcomm.dispatch.placement import PlacementResult
    from fastcomm.dispatch.schedules import Terms
    from fastcomm.dispatch.simulation import DispatchSweep, Simulation

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
_NETWORK = "Network"
_network = partial(option_of, DispatchOptions, group=_NETWORK)
_workload = partial(option_of, WorkloadOptions, group=WORKLOAD)
_COPYING = ("fast", "direct", "spreadout", "hierarchical")
_TERMS = (
    cluster_option("none"),
    _network(
        "bw_inter",
        "NIC bandwidth per GPU, as in 50GB/s or 400Gbit/s. Default: 50GiB/s.",
        metavar="RATE",
        is_common=True,
    ),
    _network(
        "bw_intra",
        "Bandwidth per GPU inside its node. Default: 400GiB/s.",
        metavar="RATE",
        is_common=True,
    ),
    _network(
        "inter_efficiency", "Share of --bw-inter that is reached.", type=Number(EFFICIENCY)
    ),
    _network(
        "intra_efficiency", "Share of --bw-intra that is reached.", type=Number(EFFICIENCY)
    ),
    _network(
        "inter_start", "Startup time of a message between nodes, as in 2us.", type=DURATION
    ),
    _network(
        "intra_start", "Startup time of a message inside a node, as in 2us.", type=DURATION
    ),
    _network(
        "incast",
        "Slowdown of a receiver per sender beyond the first (with --schedules direct).",
        type=Number(FACTOR),
        needs=("--schedules direct",),
    ),
    _network("token_bytes", "Bytes of a dispatched token.", type=BYTES),
    _network("combine_bytes", "Bytes of a returned token.", type=BYTES),
    _network(
        "demand",
        "Send a GPU one copy of a token for each of its experts, or a single one.",
        needs=tuple(f"--schedules {name}" for name in _COPYING),
    ),
    _network(
        "decomposition",
        "How --schedules fast picks its stages: threshold, incremental or assignment.",
        metavar="METHOD",
        needs=("--schedules fast",),
    ),
)


def _whole(name: str) -> click.IntRange:
    """Return the type of an option of the recipe that is a whole number."""
    return click.IntRange(int(RANGES[name].least), int(RANGES[name].most))


def shape_options(defaults: bool) -> tuple[Callable[[F], F], ...]:
    """Return the options of the shape.

    `defaults` adds the default of each to its help text.
    """
    recipe = Recipe()
    whole = [
        _workload(
            name,
            f"{text} Default: {getattr(recipe, name)}." if defaults else text,
            type=_whole(name),
            is_common=name in _COMMON_SHAPE,
        )
        for name, text in _SHAPE.items()
    ]
    types = f"Type of the elements: {', '.join(DTYPE_BYTES)}."
    return (*whole, _workload("dtype", types, metavar="NAME"))


DRAWING = (
    _workload(
        "zipf_alpha",
        "Exponent of the Zipf law.",
        type=Number(RANGES["zipf_alpha"]),
        is_common=True,
    ),
    _workload("seed", "Random seed. Default: 0.", type=_whole("seed")),
    compat_option(WorkloadOptions, "the workload of the original simulator"),
    _workload(
        "law",
        f"How popular experts are: {', '.join(LAWS)}. Default: zipf.",
        metavar="NAME",
        is_common=True,
    ),
    _workload(
        "distinct", "How a repeated expert of a token is replaced: by any other, or by the law."
    ),
    _workload("shuffle", "Randomize which experts are popular."),
)


def schedules_option(default: str) -> Callable[[F], F]:
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
    files: ResultFiles

    def terms(self, recipe: Recipe) -> "Terms":
        """Return links, sizes and demand for the simulation of a workload."""
        from fastcomm.analyses.dispatch import terms_for

        return terms_for(recipe, self.network)

    def give(self, result: R, show: Callable[[R], None]) -> None:
        """Print the result with `show`, or as JSON; write --html and --output."""
        files = self.files
        if files.html is not None:
            from fastcomm.report.html import dispatch as pages
            from fastcomm.report.html.document import write as write_page

            write_page(pages.page(result), files.html)
        if files.output is not None:
            from fastcomm.report.files import write_result

            paths = write_result(result, files.output, "dispatch", xlsx=files.xlsx)
            say(*(f"wrote {path}" for path in paths))
        if files.as_json:
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
            files: ResultFiles,
            **values: Any,
        ) -> None:
            request = SimulationRequest(shape=shape, network=network, files=files)
            command(request=request, **values)

        files = result_options("dispatch.json, and the table as CSV and Parquet")
        drawing = DRAWING if draws else ()
        options = (*shape_options(defaults=draws), *drawing, *_TERMS, files)
        built = builds(shape=WorkloadOptions, network=DispatchOptions)(call)
        return with_options(options)(built)

    return decorate
