"""Options that the commands of ``fastcomm dispatch`` share, and the object they get them as."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from fastcomm.cli.commands import option, option_of, options_of
from fastcomm.cli.messages import say
from fastcomm.cli.results import ResultFiles, print_json, result_options
from fastcomm.cli.shared_options import builds, with_options
from fastcomm.dispatch import Recipe
from fastcomm.option_fields import NETWORK, field_infos
from fastcomm.planning_options import DispatchOptions, WorkloadOptions

if TYPE_CHECKING:
    from fastcomm.dispatch.placement import PlacementResult
    from fastcomm.dispatch.schedules import Terms
    from fastcomm.dispatch.simulation import DispatchSweep, Simulation

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", "Simulation", "PlacementResult", "DispatchSweep")

_SHAPE = (
    *("num_nodes", "gpus_per_node", "experts_per_gpu", "seq_len", "batch_size", "embed_size"),
    *("topk", "num_layers", "iter_num"),
)
DRAWING = options_of(
    WorkloadOptions, "zipf_alpha", "seed", "compat", "law", "distinct", "shuffle"
)


def shape_options(defaults: bool) -> tuple[Callable[[F], F], ...]:
    """Return the options of the shape.

    `defaults` adds the default of each to its help text.
    """
    dtype = option_of(WorkloadOptions, "dtype")
    if not defaults:
        return (*options_of(WorkloadOptions, *_SHAPE), dtype)
    recipe, infos = Recipe(), field_infos(WorkloadOptions)
    texts = {name: f"{infos[name].text} Default: {getattr(recipe, name)}." for name in _SHAPE}
    return (*(option_of(WorkloadOptions, name, help=texts[name]) for name in _SHAPE), dtype)


def schedules_option(default: str) -> Callable[[F], F]:
    """Return the option of the schedules to simulate."""
    return option(
        "--schedules",
        "names",
        default=default,
        metavar="LIST",
        group=NETWORK,
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
        options = (
            *shape_options(defaults=draws),
            *drawing,
            *options_of(DispatchOptions),
            files,
        )
        built = builds(shape=WorkloadOptions, network=DispatchOptions)(call)
        return with_options(options)(built)

    return decorate
