"""Print a strategy search in the terminal, and write its files."""

from collections.abc import Callable, Iterable, Sequence

from rich.markup import escape

from fastcomm.hardware.calibration import Calibration, ComputeResidual
from fastcomm.isp.explanation import memory_terms, time_terms
from fastcomm.isp.layer import Term, two_gpus
from fastcomm.isp.problem import SearchProblem
from fastcomm.isp.result import HardwareChange, Record, SearchResult
from fastcomm.isp.search import SearchSweep, SweepPoint
from fastcomm.isp.space import REASONS
from fastcomm.show.console import TerminalTable, plain_console, say, table
from fastcomm.units import (
    counted,
    format_bandwidth,
    format_binary_bytes,
    format_s,
    percent,
    signed_percent,
)

_FRONT = 6  # rows of the Pareto front
_LAYOUT = {"world_size": "GPUs", "interleave": "vpp"}
_LEGEND = (
    "sp: GPUs that share a sequence or tensors. vpp: pipeline stages per GPU. shards: into "
    "how many parts parameters/gradients/optimizer states are divided. batches: micro-batches "
    "per step x sequences in each. GiB: memory on the fullest GPU."
)
_CKPT = {0: "none", 1: "full", 2: "selective"}
_SHADES = " ░▒▓█"
_KILO = 1024


def show(result: SearchResult, top: int) -> None:
    """Print the ranking, the best of each algorithm, and speed against memory.

    `top` is the number of strategies of the ranking.
    """
    console = plain_console()
    for line in _head(result):
        say(console, escape(line), hanging=2)
    console.print(_ranking("fastest", result.best(top), result.problem))
    if len(result.problem.world_sizes) > 1:
        console.print(
            _ranking("by GPUs", list(result.best_by_world().values()), result.problem)
        )
    best = result.best_by_algo()
    console.print(_ranking("algorithm", list(best.values()), result.problem))
    console.print(_breakdown(best, result.problem))
    front = result.pareto()
    if len(front) > 1:
        step = max(1, (len(front) - 1) / (_FRONT - 1))
        chosen = sorted({min(len(front) - 1, round(i * step)) for i in range(_FRONT)})
        console.print(
            _ranking("less memory", [front[place] for place in chosen], result.problem)
        )
    notes(result.notes)
    if any(record.get("extrapolated") for record in result.best(top)):
        notes(["attention was not measured at this size: its time is extrapolated"])
    say(console, _LEGEND, hanging=2, style="dim")


def notes(notes: Iterable[str]) -> None:
    """Print notes, a line each."""
    for note in notes:
        say(plain_console(), f"[yellow]note:[/] {escape(note)}", hanging=2)


def _head(result: SearchResult) -> list[str]:
    """Return the lines on the fastest strategy, on the job, and on rejected candidates."""
    problem = result.problem
    sizes = problem.world_sizes
    world = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    reasons = ", ".join(
        f"{count} {REASONS.get(reason, f'by {reason}')}"
        for reason, count in result.rejected.items()
        if count
    )
    mode = "" if result.mode == "default" else f", as {result.mode}"
    return [
        *(_fastest(record, problem) for record in result.best(1)),
        f"{problem.model.name} ({problem.model.parameters / 1e9:.2f} G parameters) "
        f"on {world} {result.cluster}, {problem.seq_len} tokens/sequence{mode}",
        f"{counted(result.candidates, 'candidate')}, {result.feasible} feasible; rejected: "
        f"{reasons or 'none'}",
    ]


def _fastest(record: Record, problem: SearchProblem) -> str:
    """Return the sentence on the fastest strategy: its layout, speed and memory."""
    mfu = f", MFU {percent(record['mfu'])} (full attention)" if "mfu" in record else ""
    return (
        f"Fastest: {_name(record, problem)} on {record['world_size']} GPUs, "
        f"pp {record['pp']}, sp {record['sp']}: {format_s(record['total_latency'])} a step, "
        f"{record['tgs']:.1f} tokens/s/GPU{mfu}, {record['total_mm_cost'] / 2**30:.1f} GiB"
    )


def _name(record: Record, problem: SearchProblem) -> str:
    """Return the name of a strategy; with `sp` 1, MTP, MSP and FSP are the same."""
    is_plain = record["sp"] == 1 and record["algo_type"] != "isp"
    return "data parallelism" if is_plain else _algorithm(record["algo_type"], problem)


def _algorithm(name: str, problem: SearchProblem) -> str:
    """Return the name of an algorithm as tables show it; DSP is searched as a kind of ISP."""
    return "DSP" if problem.ulysses else name.upper()


def _shards(record: Record) -> str:
    """Return the numbers of shards of parameters, gradients and optimizer states."""
    shards = [record.get(f"p_{part}") for part in ("para", "grads", "os")]
    if shards[0] is None:
        weights, states = record["wp_size"], record["zp_size"]
        is_isp = record["algo_type"] == "isp"
        shards = [weights, weights, weights * states] if is_isp else [1, 1, states]
    return "/".join(map(str, shards))


def _ranking(title: str, records: Sequence[Record], problem: SearchProblem) -> TerminalTable:
    """Return a table of strategies in the order of `records`; `title` heads the algorithms."""
    layout = ["pp", "sp"]
    if any(record.get("interleave", 1) > 1 for record in records):
        layout.insert(1, "interleave")
    if len(problem.world_sizes) > 1:
        layout.insert(0, "world_size")
    if problem.model.experts:
        layout.append("ep")
    columns = ("shards", "batches", "recompute", "step", "tokens/s/GPU", "MFU", "GiB")
    shown = [_LAYOUT.get(name, name) for name in layout]
    rows = table(title, *shown, *columns, drop=("MFU", "shards"))
    for record in records:
        rows.add_row(
            _algorithm(record["algo_type"], problem),
            *(str(record[name]) for name in layout),
            _shards(record),
            f"{record['micro_num']} x {record['micro_bsz']}",
            _CKPT[record["activation_ckpt"]],
            format_s(record["total_latency"]),
            f"{record['tgs']:.1f}",
            percent(record["mfu"]) if "mfu" in record else "",
            f"{record['total_mm_cost'] / 2**30:.1f}",
        )
    return rows


def _breakdown(best: dict[str, Record], problem: SearchProblem) -> TerminalTable:
    """Return a table of the shares of a step, with a column for each algorithm."""
    terms = {algo: time_terms(record, problem) for algo, record in best.items()}
    rows = table("where a step goes", *(_algorithm(algo, problem) for algo in terms))
    for row in zip(*(parts[1:] for parts in terms.values()), strict=True):
        shares = [
            part.value / whole[0].value for part, whole in zip(row, terms.values(), strict=True)
        ]
        if any(shares):
            rows.add_row(row[0].name, *(percent(share) for share in shares))
    return rows


def explain(result: SearchResult, place: int) -> None:
    """Print the terms of one strategy, and what its algorithm sends and saves on two GPUs.

    `place` is that of the strategy in the ranking, from 0.
    """
    console = plain_console()
    record = result.record(place)
    for line in _head(result)[:2]:
        say(console, escape(line), hanging=2)
    console.print(_ranking(f"strategy {place + 1}", [record], result.problem))
    console.print(terms_table("time", time_terms(record, result.problem), format_s))
    console.print(terms_table("memory", memory_terms(record), format_binary_bytes))
    if not result.problem.model.experts:
        say(console, _on_two(record["algo_type"], result.problem), hanging=2)
    notes(result.notes)
    say(console, _LEGEND, hanging=2, style="dim")


def _on_two(algo: str, problem: SearchProblem) -> str:
    """Return the sentence on what an algorithm sends and saves on two GPUs."""
    two = two_gpus(algo)
    return (
        f"On two GPUs {_algorithm(algo, problem)} sends {two['sent']:g} times a micro-batch's "
        f"activations per layer ({two['sent_with_checkpoints']:g} with recompute), and saves "
        f"{two['kept'] / 2:.1f} times as much for the backward pass."
    )


def terms_table(title: str, terms: list[Term], form: Callable[[float], str]) -> TerminalTable:
    """Return the table of the terms of a cost.

    Parameters
    ----------
    title
        Title of the table.
    terms
        The first is the whole, to which shares refer; terms of value 0 below it are left out.
    form
        Formats a value.

    """
    rows = table(title, "amount", "share", "how it comes about", texts=("how it comes about",))
    whole = terms[0].value
    for term in terms:
        if term.value or not term.level:
            indent = "  " * term.level
            share = percent(term.value / whole) if whole else ""
            rows.add_row(f"{indent}{term.name}", form(term.value), share, escape(term.text))
    return rows


def changes(hardware_changes: Sequence[HardwareChange]) -> None:
    """Print how much faster the best strategy would be on a better cluster."""
    rows = table("what if", "tokens/s/GPU", "gain", "strategy")
    for change in hardware_changes:
        if change.best is None:
            rows.add_row(change.name, "n/a", "n/a", "")
            continue
        best = change.best
        gain = "n/a" if change.gain is None else signed_percent(change.gain)
        strategy = f"{best['algo_type'].upper()} pp {best['pp']} sp {best['sp']}"
        rows.add_row(change.name, f"{best['tgs']:.1f}", gain, strategy)
    plain_console().print(rows)


def calibration(result: Calibration) -> None:
    """Print the fitted lines of links and curves of kernels, and the errors of the fits."""
    console = plain_console()
    if result.residuals:
        console.print(_links(result))
    if result.compute:
        console.print(_kernels(result.compute))
    for reason in result.skipped:
        say(console, f"[yellow]not fitted:[/] {escape(reason)}", hanging=2)


def _kernels(curves: Sequence[ComputeResidual]) -> TerminalTable:
    """Return the table of measured kernels: speed, and errors of the fitted curves."""
    columns = ("calls", "GFLOP", "TFLOP/s", "of curve", "median error", "worst")
    rows = table("calibrated", *columns, drop=("calls", "GFLOP"))
    for line in curves:
        rows.add_row(
            line.kind,
            str(line.calls),
            f"{line.flops / 1e9:.3g}",
            f"{line.rate / 1e12:.3g}",
            percent(line.efficiency, 0),
            percent(line.median_error),
            percent(line.worst_error),
        )
    return rows


def _links(result: Calibration) -> TerminalTable:
    """Return the table of measured collectives: the fitted lines, and their errors."""
    rows = table(
        *("calibrated", "GPUs", "messages", "sizes", "start", "bus bandwidth", "median error"),
        "worst",
        drop=("sizes", "messages"),
    )
    for line in result.residuals:
        rows.add_row(
            line.op,
            str(line.ranks),
            str(line.messages),
            str(line.sizes),
            format_s(line.alpha),
            format_bandwidth(line.bus),
            percent(line.median_error),
            percent(line.worst_error),
        )
    return rows


def heat_map(sweep: SearchSweep) -> None:
    """Print a table of tokens/s/GPU by world size and sequence length, shaded by MFU."""
    worlds = sorted({cell.world_size for cell in sweep.cells})
    rows = table("tokens/s/GPU, MFU", *(counted(world, "GPU") for world in worlds))
    for seq_len in sorted({cell.seq_len for cell in sweep.cells}):
        row = {cell.world_size: cell for cell in sweep.cells if cell.seq_len == seq_len}
        name = f"{seq_len // _KILO}Ki" if seq_len % _KILO == 0 else str(seq_len)
        rows.add_row(name, *(_shaded(row[world]) for world in worlds))
    console = plain_console()
    console.print(rows)
    reasons = dict.fromkeys(
        f"{cell.seq_len} on {cell.world_size}: {cell.why}" for cell in sweep.cells if cell.why
    )
    for reason in reasons:
        say(console, f"[yellow]n/a[/] {escape(reason)}", hanging=2)
    notes(sweep.notes)


def _shaded(cell: SweepPoint) -> str:
    """Return a cell of the heat map: algorithm, tokens/s/GPU, MFU, and a shade by MFU."""
    if not cell.best:
        return "n/a"
    share = min(1.0, cell.best["mfu"])
    shade = _SHADES[min(len(_SHADES) - 1, int(share * len(_SHADES)))]
    best = cell.best
    return f"{best['algo_type'].upper()} {best['tgs']:.0f} {percent(share, 0)} {shade * 2}"
