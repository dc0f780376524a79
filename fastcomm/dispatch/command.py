"""``fastcomm dispatch`` and its commands."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.checks import FACTOR, invalid, option_name, shortened
from fastcomm.cli.commands import CommandGroup, option, option_of, options_of
from fastcomm.cli.messages import say
from fastcomm.cli.results import (
    ResultFiles,
    give,
    output_option,
    print_json,
    result_options,
)
from fastcomm.cli.run_options import builds, with_options, workers_option
from fastcomm.dispatch.options import (
    DispatchOptions,
    ExchangeOptions,
    ModelOptions,
    PlaceOptions,
    WorkloadOptions,
)
from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import ConfigError, inert
from fastcomm.option_fields import NETWORK, WORKLOAD, field_infos
from fastcomm.units import counted

if TYPE_CHECKING:
    from fastcomm.dispatch.model_exchange import ModelExchange
    from fastcomm.dispatch.placement_gain import PlacementResult
    from fastcomm.dispatch.run_exchange import RunExchange
    from fastcomm.dispatch.schedules import Terms
    from fastcomm.dispatch.simulation import Simulation
    from fastcomm.dispatch.sweep import DispatchSweep

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar(
    "R", "Simulation", "PlacementResult", "DispatchSweep", "ModelExchange", "RunExchange"
)
_SHAPE = (
    *("num_nodes", "gpus_per_node", "experts_per_gpu", "seq_len", "batch_size", "embed_size"),
    *("topk", "num_layers", "iter_num"),
)
DRAWING = options_of(
    WorkloadOptions, "zipf_alpha", "seed", "compat", "law", "distinct", "shuffle"
)
_EXAMPLES = """\b
Examples:
  fastcomm dispatch generate --num-nodes 4 --iter-num 10 --seed 0 -o workload
  fastcomm dispatch compare --model deepseek-v3 --ep 64 --cluster h100
  fastcomm dispatch simulate --schedules deepep,fast workload --json
  fastcomm dispatch place workload --replicas 1.5
  fastcomm dispatch sweep --over num_nodes=2,4,8 --over zipf_alpha=1.1,1.5,2
  fastcomm dispatch evaluate deepep.parquet --cluster dgx-h100
"""
_NOT_DRAWN = ("--compat seed",)  # which has a stream of its own
# The original's names of options have underscores: --num_nodes is --num-nodes.
_CONTEXT = {"token_normalize_func": lambda word: word.replace("_", "-")}
_example = "\b\nExample:\n  fastcomm dispatch {}\n".format
_place = partial(option, group=WORKLOAD, is_common=True)


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


def schedules_option(default: str | None) -> Callable[[F], F]:
    """Return the option of the schedules to simulate; all of them if `default` is None."""
    text = "Schedules of the all-to-all to simulate."
    return option(
        "--schedules",
        "names",
        default=default,
        metavar="LIST",
        group=NETWORK,
        is_common=True,
        help=text if default else f"{text} Default: every schedule.",
    )


_WITH_STAGES = "dispatch.json; table, stages of fast (CSV, Parquet)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What every command that simulates is asked: a workload's shape, links, and files."""

    shape: WorkloadOptions
    network: DispatchOptions
    files: ResultFiles

    def terms(self, recipe: Recipe) -> "Terms":
        """Return links, sizes and demand for the simulation of a workload."""
        from fastcomm.dispatch.analysis import terms_for

        return terms_for(recipe, self.network)

    def give(self, result: R, show: Callable[[R], None]) -> None:
        """Print the result with `show`, or as JSON; write --html and --output."""
        files = self.files
        if files.html is not None:
            from fastcomm.dispatch import page as pages
            from fastcomm.show.pages import write as write_page

            write_page(pages.page(result), files.html)
        if files.output is not None:
            from fastcomm.show.files import write_result

            paths = write_result(result, files.output, "dispatch", xlsx=files.xlsx)
            paths += _stage_files(result, files.output)
            say(*(f"wrote {path}" for path in paths))
        if files.as_json:
            print_json(result)
        else:
            show(result)


def _stage_files(result: object, folder: Path) -> list[Path]:
    """Write the stages of a simulation, if it has some, as CSV and Parquet."""
    from fastcomm.dispatch.simulation import Simulation
    from fastcomm.show.files import write_tables

    one = getattr(result, "simulation", result)
    if not isinstance(one, Simulation) or not (stages := one.stages()).num_rows:
        return []
    return write_tables(folder, {}, {"stages": stages})


def simulates(
    *, draws: bool = False, files: str = "dispatch.json, and the table as CSV and Parquet"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a command that simulates.

    The command gets a `SimulationRequest` as `request`. One that `draws` a workload takes the
    options of drawing, too. `files` names the files of `--output`, for the help.
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

        drawing = DRAWING if draws else ()
        options = (
            *shape_options(defaults=draws),
            *drawing,
            *options_of(DispatchOptions),
            result_options(files),
        )
        built = builds(shape=WorkloadOptions, network=DispatchOptions)(call)
        return with_options(options)(built)

    return decorate


@click.group("dispatch", cls=CommandGroup, epilog=_EXAMPLES, context_settings=_CONTEXT)
def run() -> None:
    """Simulate the all-to-all of a mixture of experts: schedules, bounds, placement."""


@run.command("generate", epilog=_example("generate --num-nodes 4 --seed 0 -o workload"))
@builds(shape=WorkloadOptions)
@with_options(shape_options(defaults=True))
@with_options(DRAWING)
@option(
    "--popularity",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    group=WORKLOAD,
    needs=("--law popularity",),
    help="Text file with the weight of each expert (with --law popularity).",
)
@option(
    "--hot-ranks",
    metavar="LIST",
    group=WORKLOAD,
    not_with=_NOT_DRAWN,
    help="GPUs with more tokens, as in 0:4,5:2 for 4 times and twice as many.",
)
@workers_option("threads", not_with=_NOT_DRAWN)
@output_option("One Parquet file per iteration", required=True)
def generate(
    *,
    popularity: Path | None,
    hot_ranks: str | None,
    workers: int,
    output: Path,
    shape: WorkloadOptions,
) -> None:
    """Draw a workload, and write one Parquet file per iteration."""
    from fastcomm.dispatch import workload
    from fastcomm.dispatch.analysis import compiling

    if shape.law == "popularity" and popularity is None:
        raise ConfigError(
            "--law popularity needs --popularity FILE, a text file with a weight per expert"
        )
    weights = None if popularity is None else _numbers(popularity)
    recipe = Recipe.of(**{"law": "zipf", **shape.recipe_values()})
    more: dict[str, Any] = {"popularity": weights, "threads": workers}
    if hot_ranks is not None:
        more["sources"] = _sources(hot_ranks, recipe)
    if recipe.law == "seed":
        more = {}
    with compiling(["workload"]):
        files = workload.write(recipe, output, **more)
    click.echo(
        f"{inert(str(output))}: {counted(len(files), 'iteration')} of "
        f"{counted(recipe.num_layers, 'layer')}, {counted(recipe.tokens, 'token')} of "
        f"{counted(recipe.topk, 'expert')} on {counted(recipe.gpus, 'GPU')}"
    )


@run.command(
    "simulate",
    has_tables=True,
    epilog=_example("simulate workload --schedules deepep,fast --cluster dgx-h100"),
)
@click.argument("workload", type=click.Path(exists=True, path_type=Path))
@schedules_option("deepep,fast")
@simulates(files=_WITH_STAGES)
def simulate(*, workload: Path, names: str, request: SimulationRequest) -> None:
    """Simulate a workload under some strategies.

    Names the bottleneck of each strategy. WORKLOAD is a directory of `generate`, or a routing
    table of a job: an .npz of src_gpu [tokens] and target_experts [tokens, top-k], a Parquet
    file with these columns, or an .npy of experts. A generated workload has its own shape;
    options that contradict it are errors.

    Strategies: deepep-compat, fast-compat, deepep, deepep-ll, fast, fast-published, direct,
    spreadout, hierarchical, multicast-balanced.
    """
    from fastcomm.compat.dispatch import STRATEGIES
    from fastcomm.dispatch import simulation, tables
    from fastcomm.dispatch.analysis import compiling
    from fastcomm.dispatch.workload import open_workload

    opened = open_workload(workload, request.shape)
    terms, chosen = request.terms(opened.recipe), names.split(",")
    with compiling(chosen):
        result = simulation.simulate(opened, chosen, terms, available=STRATEGIES)
    request.give(result, tables.show)


@run.command(
    "compare",
    has_tables=True,
    epilog=_example("compare --model deepseek-v3 --ep 64 --cluster h100"),
)
@click.argument("workload", required=False, type=click.Path(exists=True, path_type=Path))
@schedules_option(None)
@builds(options=ModelOptions)
@with_options(options_of(ModelOptions))
@simulates(draws=True, files=_WITH_STAGES)
def compare(
    *,
    workload: Path | None,
    names: str | None,
    options: ModelOptions,
    request: SimulationRequest,
) -> None:
    """Compare schedules and kernels with the best time.

    Without WORKLOAD, draws one from the options and does not store it. With --model, times the
    kernels of DeepEP, HybridEP, NCCL and TensorRT-LLM as well, by measurements of the GPU. With
    --from-run, says what schedules and an even load would save in a run.
    """
    from fastcomm.compat.dispatch import STRATEGIES
    from fastcomm.dispatch import simulation, tables
    from fastcomm.dispatch.analysis import compiling
    from fastcomm.dispatch.schedules import STRATEGIES as OWN
    from fastcomm.dispatch.workload import Workload, open_workload

    shape = request.shape
    if workload is not None and (options.model or options.from_run):
        name = "--model" if options.model else "--from-run"
        raise ConfigError(f"{name} has no effect with WORKLOAD; leave one out")
    if options.from_run is not None:
        from fastcomm.dispatch.run_exchange import BY_BYTES, compare_recorded

        recorded = compare_recorded(
            options.from_run,
            request.network,
            names.split(",") if names else BY_BYTES,
            shape.gpus_per_node,
        )
        request.give(recorded, tables.recorded)
        return
    if options.model is not None:
        from fastcomm.dispatch.model_exchange import compare_kernels

        chosen = names.split(",") if names else tuple(OWN)
        network = request.network
        with compiling(["workload", *chosen]):
            compared = compare_kernels(options, shape, network, chosen, available=STRATEGIES)
        request.give(compared, tables.kernels)
        return
    chosen = names.split(",") if names else tuple(STRATEGIES)
    with compiling(chosen if workload else ("workload", *chosen)):
        opened = open_workload(workload, shape) if workload else Workload.of(_recipe(shape))
        terms = request.terms(opened.recipe)
        result = simulation.simulate(opened, chosen, terms, available=STRATEGIES, lenient=True)
    request.give(result, tables.compare)


@run.command("place", has_tables=True, epilog=_example("place workload --replicas 1.5"))
@click.argument("workload", type=click.Path(exists=True, path_type=Path))
@_place(
    "--load",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measured load of experts: CSV, Parquet, JSON or text. Default: the workload's.",
)
@_place(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Placement of today: the JSON of an earlier place. Default: experts in order.",
)
@builds(options=PlaceOptions)
@with_options(options_of(PlaceOptions))
@schedules_option("deepep,fast,multicast-balanced")
@simulates()
def place(
    *,
    workload: Path,
    load: Path | None,
    before: Path | None,
    options: PlaceOptions,
    names: str,
    request: SimulationRequest,
) -> None:
    """Place replicas of experts by their load.

    Simulates WORKLOAD before and after, and counts the experts that move. With loads of several
    steps, says when a new placement pays for its moves.
    """
    from fastcomm.dispatch import placement_gain, tables
    from fastcomm.dispatch.analysis import compiling
    from fastcomm.dispatch.expert_files import read_loads, read_placements
    from fastcomm.dispatch.workload import open_workload

    opened = open_workload(workload, request.shape)
    recipe = opened.recipe
    sizes = recipe.num_layers, recipe.experts
    loads = None if load is None else read_loads(load, *sizes)
    placed = None if before is None else read_placements(before, *sizes, recipe.gpus)
    terms, chosen = request.terms(recipe), names.split(",")
    with compiling(["placement", *chosen]):
        result = placement_gain.place_experts(
            opened, chosen, terms, options, loads=loads, placed=placed
        )
    request.give(result, tables.place)


@run.command(
    "sweep",
    has_tables=True,
    epilog=_example("sweep --over num_nodes=2,4 --over zipf_alpha=1.1,2"),
)
@option(
    "--over",
    multiple=True,
    required=True,
    metavar="NAME=LIST",
    group=WORKLOAD,
    is_common=True,
    help="Values of a workload option, as in zipf_alpha=1.1,2. Repeatable.",
)
@schedules_option("deepep,fast,multicast-balanced")
@simulates(draws=True)
def sweep(*, over: tuple[str, ...], names: str, request: SimulationRequest) -> None:
    """Simulate strategies over a grid of workloads.

    The axes are options of a workload: skew, nodes, top-k, tokens.
    """
    from fastcomm.compat.dispatch import STRATEGIES
    from fastcomm.dispatch import tables
    from fastcomm.dispatch.analysis import compiling
    from fastcomm.dispatch.sweep import parse_axis, simulate_grid

    axes = [parse_axis(text) for text in over]
    _check_distinct([name for name, _ in axes])
    grid = dict(axes)
    _check_axes(grid, request.shape)
    shape = replace(request.shape, iter_num=request.shape.iter_num or 1)
    recipe, chosen = _recipe(shape), names.split(",")
    with compiling(["workload", *chosen]):
        result = simulate_grid(recipe, grid, chosen, request.terms, available=STRATEGIES)
    request.give(result, tables.sweep)


@run.command(
    "evaluate",
    has_tables=True,
    epilog=_example("evaluate deepep.parquet --cluster h100 --calibrate"),
)
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@builds(options=ExchangeOptions)
@with_options(options_of(ExchangeOptions))
@result_options("evaluation.json, and the rows as CSV and Parquet", xlsx=False)
def evaluate(*, table: Path, options: ExchangeOptions, files: ResultFiles) -> None:
    """Compare measured expert all-to-alls with predictions.

    TABLE is Parquet or CSV, a row per shape, with the columns mode (normal or low_latency),
    nodes, ranks, hidden, topk, experts, tokens (of a rank), sms, dispatch_us and combine_us, as
    DeepEP's benchmark measures them, or others (docs/dispatch.md). Prints the errors by GPU,
    kernels, number of nodes, and phase.
    """
    from fastcomm.dispatch import tables
    from fastcomm.dispatch.evaluation import evaluate_exchanges

    cluster = options.cluster or "dgx-h100"
    result = evaluate_exchanges(table, cluster, calibrate=options.calibrate)
    if files.html is not None:
        from fastcomm.dispatch import page as pages
        from fastcomm.show.pages import write as write_page

        write_page(pages.evaluation(result), files.html)
    give(result, files, "evaluation", tables.evaluation, table="rows")


def _check_distinct(names: Sequence[str]) -> None:
    """Raise `ConfigError` if an axis is given twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"--over {name}: given {count} times; pass all values at once, as in "
                f"--over {name}=VALUE,VALUE"
            )


def _check_axes(grid: Mapping[str, Sequence[Any]], shape: WorkloadOptions) -> None:
    """Raise `ConfigError` if an axis is an option that is given, or that has no effect."""
    own = {name: values[0] for name, values in grid.items() if hasattr(shape, name)}
    if typed := [name for name in own if getattr(shape, name) is not None]:
        raise ConfigError(
            f"{option_name(typed[0])} has no effect with --over {typed[0]}; leave one out"
        )
    try:
        replace(shape, **own)
    except ConfigError as error:
        raise ConfigError(f"--over: {error}") from error


def _recipe(shape: WorkloadOptions) -> Recipe:
    """Return the recipe of a workload that is not stored; defaults for what is not given."""
    if shape.law == "popularity":
        raise ConfigError(
            "--law popularity needs a workload with weights: draw one with `fastcomm dispatch "
            "generate --law popularity --popularity FILE -o DIR`, and simulate that"
        )
    return Recipe.of(**{"law": "zipf", **shape.recipe_values()})


def _numbers(path: Path) -> list[float]:
    """Return the numbers of a text file, which spaces, lines or commas separate."""
    from fastcomm.files import text

    try:
        return [float(word) for word in text(path).replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; the file may have only numbers") from error


def _sources(text: str, recipe: Recipe) -> list[int]:
    """Return the tokens of each GPU; `text` has multiples of some GPUs, as in "0:4,5:2"."""
    weight = [1.0] * recipe.gpus
    for part in text.split(","):
        gpu, _, factor = part.partition(":")
        try:
            index, weight_ = int(gpu), float(factor)
        except ValueError:
            index, weight_ = -1, 0.0
        if not 0 <= index < recipe.gpus or not FACTOR.holds(weight_):
            expected = f"GPU:FACTOR as in 0:4, a GPU from 0 to {recipe.gpus - 1} and {FACTOR}"
            raise invalid("--hot-ranks", repr(shortened(part)), expected)
        weight[index] = weight_
    if not sum(weight):
        raise invalid("--hot-ranks", repr(shortened(text)), "a factor above 0")
    edges, passed = [0], 0.0
    for own in weight:
        passed += own
        edges.append(round(recipe.tokens * passed / sum(weight)))
    return [after - before for before, after in itertools.pairwise(edges)]
