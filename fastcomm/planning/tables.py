"""Print prices of fixed strategies, and errors on measured runs; write their files."""

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape

from fastcomm.hardware.gpus import gpu
from fastcomm.isp.tables import notes, terms_table
from fastcomm.planning.expected import ExpectedError, expected_error
from fastcomm.planning.measured_runs import GroupError, RunCalibration, RunPrice
from fastcomm.planning.price import PlanPrice
from fastcomm.planning.result import (
    Evaluation,
    PriceResult,
    strategy_text,
    suspect,
)
from fastcomm.planning.search import PlanSearch, bottleneck
from fastcomm.show.console import TerminalTable, na, plain_console, say, table
from fastcomm.units import (
    counted,
    format_binary_bytes,
    format_s,
    percent,
    signed_percent,
)

_RUNS_LEGEND = (
    "median, 90 % below: absolute error of tokens/s/GPU. bias: median error; above 0 is too "
    "fast. in interval: runs in the interval to expect. memory: median absolute error of the "
    "memory. no fit: runs predicted not to fit."
)


def show_price(result: PriceResult) -> None:
    """Print one strategy: its speed and memory, and every term of both."""
    console = plain_console()
    price, expected = result.price, result.expected
    fits = "fits" if price.fits else "does not fit"
    say(
        console,
        f"{format_s(price.step_s)} a step, {price.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU "
        f"{percent(price.mfu)} (causal attention, bf16 peak), "
        f"{price.memory_bytes / 2**30:.1f} GiB ({fits})",
        hanging=2,
    )
    say(console, _expected(expected), hanging=2)
    say(console, escape(f"{price.plan.model.name}: {strategy_text(price.plan)}"), hanging=2)
    if result.fullest:
        share, limits = result.fullest
        text = f"fullest rank of experts: {share:.2f} times the mean rows"
        spread = "not measured for these ranks"
        if limits is not None:
            spread = f"nine of ten times {limits[0]:.2f} to {limits[1]:.2f}"
        say(console, f"{text}; {spread}", hanging=2)
    console.print(terms_table("time", list(price.time), format_s))
    console.print(terms_table("memory", list(price.memory), format_binary_bytes))
    if result.halves:
        console.print(_halves(result))
    if result.what_ifs:
        console.print(_what_ifs(result))
    if result.calibration:
        show_calibration(result.calibration)
    if result.note:
        notes([result.note])


def _halves(result: PriceResult) -> TerminalTable:
    """Return the table of host and GPU of a layer with experts."""
    rows = table("layer, both passes", "host", "GPU")
    for half in result.halves:
        rows.add_row(half.name, format_s(half.host_s), format_s(half.gpu_s))
    return rows


def _what_ifs(result: PriceResult) -> TerminalTable:
    """Return the table of single changes that shorten the step."""
    rows = table("what if", "step", "change", "memory", "in --strategy")
    for row in result.what_ifs:
        change = signed_percent(row.step_s / result.price.step_s - 1)
        memory = format_binary_bytes(row.memory_bytes)
        rows.add_row(row.name, format_s(row.step_s), change, memory, row.change)
    return rows


def _expected(expected: ExpectedError) -> str:
    """Return the line on the error to expect."""
    if expected.median is None:
        return f"error to expect: n/a, {expected.reason}"
    wider = f" (interval of the wider class {expected.wider})" if expected.wider else ""
    return (
        f"error to expect: {percent(expected.median, 0)} (median of {expected.runs} published "
        f"runs: {expected.of}); nine of ten lie in {expected.low:.0f} to {expected.high:.0f} "
        f"tokens/s/GPU{wider}"
    )


_SEARCH_LEGEND = (
    "tensor, pipeline, context, expert: GPUs of each parallelism; 4 x 5 are 5 virtual stages "
    "a GPU. micro-batches: number a step x sequences in each. recompute: a number counts "
    "layers of a stage. bottleneck: longest term besides GEMM, experts and attention, of the "
    "step. A row is the fastest strategy of its layout. tokens/s/GPU: nine of ten measurements "
    "lie in the interval."
)


def show_search(result: PlanSearch, top: int) -> None:
    """Print the `top` fastest layouts of a search, and the error to expect."""
    console = plain_console()
    job, prices = result.job, result.prices(top)
    best = prices[0]
    strategy = strategy_text(best.plan).replace(",", ", ")
    head = (
        f"Fastest: {strategy}: {format_s(best.step_s)} a step, "
        f"{best.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU {percent(best.mfu)} (causal "
        f"attention, bf16 peak), {best.memory_bytes / 2**30:.1f} GiB"
    )
    say(console, escape(head), hanging=2)
    say(
        console,
        escape(
            f"{job.model.name} on {job.gpus} {gpu(job.gpu).name}, {job.global_batch} x "
            f"{job.seq_len} tokens a step, as {job.trainer_rules.title} trains; "
            f"{result.candidates} strategies, {len(result.plans)} fit"
        ),
        hanging=2,
    )
    say(console, _expected(expected_error(best)), hanging=2)
    console.print(_layouts(prices))
    if result.equal > 1:
        text = f"The first {result.equal} layouts may be equally fast, by the error to expect."
        say(console, text, hanging=2)
    if result.note:
        notes([result.note])
    say(console, _SEARCH_LEGEND, hanging=2, style="dim")


# Columns that a narrow terminal does not show, the first ones first.
_DROPPED = ("sharding", "step", "data", "MFU", "dispatch")


def _layouts(prices: Sequence[PlanPrice]) -> TerminalTable:
    """Return the table of the fastest strategy of each layout."""
    plans = [price.plan for price in prices]
    optional = {
        "context": any(plan.cp > 1 for plan in plans),
        "expert": plans[0].model.experts is not None,
    }
    sizes = ["tensor", "pipeline", *(name for name, used in optional.items() if used), "data"]
    methods = ["sharding", "recompute", *(["dispatch"] if optional["expert"] else [])]
    columns = ("micro-batches", *methods, "step", "tokens/s/GPU", "MFU", "GiB")
    rows = table("layout", *sizes, *columns, "bottleneck", drop=_DROPPED)
    for place, price in enumerate(prices, 1):
        plan = price.plan
        virtual = f" x {plan.vp}" if plan.vp > 1 else ""
        spread = f" (tensor {plan.etp})" if plan.etp > 1 else ""
        cells = {
            "tensor": str(plan.tp),
            "pipeline": f"{plan.pp}{virtual}",
            "context": str(plan.cp),
            "expert": f"{plan.ep}{spread}",
            "data": str(plan.dp),
        }
        name, share = bottleneck(price)
        rows.add_row(
            str(place),
            *(cells[size] for size in sizes),
            f"{plan.micro_batches} x {plan.micro_batch}",
            *(getattr(plan, name) for name in methods),
            format_s(price.step_s),
            _with_error(price),
            percent(price.mfu),
            f"{price.memory_bytes / 2**30:.1f}",
            f"{name} {percent(share, 0)}",
        )
    return rows


def _with_error(price: PlanPrice) -> str:
    """Return the throughput, with the interval to expect of it."""
    expected = expected_error(price)
    interval = "" if expected.low is None else f" ({expected.low:.0f}-{expected.high:.0f})"
    return f"{price.tokens_per_s_per_gpu:.0f}{interval}"


def show_evaluation(result: Evaluation, top: int) -> None:
    """Print the errors of runs by group, and the `top` runs with the largest errors."""
    console = plain_console()
    for row in result.failed[:top]:
        name = f" ({row.id})" if row.id else ""
        text = f"[red]not priced:[/] {escape(f'line {row.line}{name}: {row.error}')}"
        say(console, text, hanging=2)
    if (more := len(result.failed) - top) > 0:
        say(console, f"[red]not priced:[/] {counted(more, 'more row')}")
    if result.groups:
        console.print(_groups(result.groups))
        say(console, _RUNS_LEGEND, hanging=2, style="dim")
        if text := _not_counted(result.rows):
            say(console, text, hanging=2, style="dim")
        console.print(_worst(result.shown(top)))
    elif result.rows:
        console.print(_predictions(result.shown(top)))
    if result.calibration:
        show_calibration(result.calibration)


def _groups(groups: list[GroupError]) -> TerminalTable:
    numbers = "number", "median", "90 % below", "bias", "in interval", "memory", "no fit"
    rows = table("runs", *numbers, texts=("runs",))
    for group in groups:
        rows.add_row(
            escape(_group_name(group)),
            str(group.runs),
            percent(group.median),
            percent(group.most, 0),
            signed_percent(group.bias),
            na(group.coverage, lambda share: percent(share, 0)),
            na(group.memory, percent),
            str(group.do_not_fit),
        )
    return rows


def _not_counted(rows: Sequence[RunPrice]) -> str:
    """Return how many measured runs of which source do not count, and their quality."""
    runs = [row.run for row in rows if row.run.measured is not None and not row.run.is_usable]
    counts = Counter((run.source, run.quality) for run in runs)
    texts = [f"{source} {count} ({quality})" for (source, quality), count in counts.items()]
    return f"not counted, by quality: {escape(', '.join(texts))}" if texts else ""


def _group_name(group: GroupError) -> str:
    """Return the name of a group; a GPU whose kernels are not measured says so."""
    if group.by == "gpu":
        return f"GPU {group.name}{_mark(group.name)}"
    return f"precision {group.name}" if group.by == "precision" else group.name


def _mark(name: str) -> str:
    """Return the mark of a GPU whose kernels are not measured; empty for others."""
    return " (not measured)" if gpu(name).derived else ""


def _gpus(row: RunPrice) -> str:
    """Return the number of GPUs of a run, their name and mark."""
    return f"{row.price.plan.gpus} {row.run.gpu.upper()}{_mark(row.run.gpu)}"


def _worst(worst: Sequence[RunPrice]) -> TerminalTable:
    doubt = "term to doubt first"
    names = "largest errors", "model", "GPUs", "measured", "predicted", "error", doubt
    rows = table(*names, texts=(doubt,))
    for row in worst:
        plan = row.price.plan
        rows.add_row(
            escape(row.run.id),
            escape(plan.model.name),
            _gpus(row),
            na(row.run.measured, lambda rate: f"{rate:.0f}"),
            f"{row.price.tokens_per_s_per_gpu:.0f}",
            na(row.error, signed_percent),
            suspect(row),
        )
    return rows


def _predictions(runs: Sequence[RunPrice]) -> TerminalTable:
    rows = table("run", "model", "GPUs", "tokens/s/GPU", "GiB", "strategy", texts=("strategy",))
    for row in runs:
        plan, price = row.price.plan, row.price
        rows.add_row(
            escape(row.run.id),
            escape(plan.model.name),
            _gpus(row),
            f"{price.tokens_per_s_per_gpu:.0f}",
            f"{price.memory_bytes / 2**30:.1f}" + ("" if price.fits else " (no fit)"),
            strategy_text(plan).replace(",", ", "),
        )
    return rows


def show_calibration(fit: RunCalibration) -> None:
    """Print what constants became, and the errors before and after."""
    console = plain_console()
    rows = table("constant", "before", "fitted")
    for name, (before, after) in fit.changes().items():
        rows.add_row(name, f"{before:.4g}", f"{after:.4g}")
    console.print(rows)
    for name, end in fit.bounds_reached().items():
        notes(
            [f"{name} stands at the end of its range, {end:g}: the runs may have another cause"]
        )
    held_out = "n/a: one group" if fit.held_out is None else percent(fit.held_out)
    say(
        console,
        f"fitted to {fit.runs} runs of {fit.groups} groups (source and model): median error "
        f"{percent(fit.before)} before, {percent(fit.fitted)} after, {held_out} on groups held "
        "out",
        hanging=2,
    )
    if fit.fitted > fit.before:
        notes(["the fit does not lessen the median error: shipped constants serve these runs"])
