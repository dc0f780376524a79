"""Fit the surfaces of measured GPUs, and write how far off they are.

`python docs/hardware_accuracy.py FOLDER` reads tables of measurements, such as
`gemm_h100.parquet`, that lie outside of the repository. It writes the surfaces to
`fastcomm/hardware/gpus` and the errors to `docs/hardware-accuracy.md`. A fifth of the shapes is
held out: errors are of these, and no surface has seen them. `--check` writes nothing, and
prints the errors of the shipped surfaces on all rows of FOLDER.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from itertools import starmap
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import nnls
from scipy.sparse.linalg import spsolve

from fastcomm.hardware.gpus import GROWTH, Gpu, Surface, corners, gpu, gpus

Floats = NDArray[np.float64]
PAGE = Path(__file__).with_name("hardware-accuracy.md")
GPUS = Path(__file__).parents[1] / "fastcomm" / "hardware" / "gpus"
MEASURED = ("a100", "h100", "b200", "gb200")
_AXES = {
    "gemm": ("m", "n", "k"),
    "attention": ("seq", "heads", "kv_heads"),
    "experts": ("copies", "experts", "weights", "tokens"),
    "collectives": ("bytes",),
}
_POWERS = {
    "gemm": (
        (1, 16, 64, 128, 256, 512, 1024, 4096, 16384, 65536),
        (32, 128, 512, 2048, 8192, 65536),
        (32, 128, 512, 2048, 8192, 65536),
    ),
    "attention": (
        (16, 256, 1024, 2048, 4096, 8192, 16384),
        (1, 8, 32, 64, 128, 512, 2048, 8192),
        (1, 4, 32, 512),
    ),
    "experts": (
        (1, 8, 64, 512, 4096, 16384, 65536, 262144),
        (1, 4, 8, 16, 32, 128, 512),
        (2**16, 2**19, *(2**power for power in range(21, 28))),
        (1, 256, 4096, 65536),
    ),
    "collectives": (tuple(float(2**power) for power in range(9, 31)),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measurements of one kind and variant: sizes, work, seconds, and a name of each shape."""

    kind: str
    variant: str
    sizes: tuple[Floats, ...]
    work: Floats  # FLOPs; bytes of a collective
    floor: Floats  # seconds of a roofline, where a surface lacks measurements
    seconds: Floats
    shapes: list[str]
    usual: NDArray[np.bool_] | None = None  # whether a shape is as trainers run it

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Whether a shape is held out: a fifth, by the hash of its name."""
        first = (hashlib.sha256(shape.encode()).digest()[0] for shape in self.shapes)
        return np.array([byte < 51 for byte in first])  # noqa: PLR2004 a fifth of 256


def _columns(folder: Path, kind: str, name: str) -> dict[str, NDArray]:
    table = pq.read_table(folder / f"{kind}_{name}.parquet")
    return {
        column: table[column].to_numpy(zero_copy_only=False) for column in table.column_names
    }


def _rows(columns: dict[str, NDArray], **wanted: object) -> dict[str, NDArray]:
    keep = reduce(np.logical_and, [columns[name] == value for name, value in wanted.items()])
    return {name: values[keep] for name, values in columns.items()}


def _numbers(columns: dict[str, NDArray], *names: str) -> list[Floats]:
    return [columns[name].astype(float) for name in names]


def _names(columns: dict[str, NDArray], *names: str) -> list[str]:
    return [",".join(map(str, row)) for row in zip(*(columns[n] for n in names), strict=True)]


def _gemms(folder: Path, name: str, chip: Gpu) -> Iterator[Table]:
    columns = _columns(folder, "gemm", name)
    for recipe in sorted(set(columns["precision"])):
        rows = _rows(columns, precision=recipe)
        m, n, k, us = _numbers(rows, "m", "n", "k", "latency_us")
        work = 2 * m * n * k
        size = 2 if recipe == "bf16" else 1
        yield Table(
            kind="gemm",
            variant=recipe,
            sizes=(m, n, k),
            work=work,
            floor=_roofline(chip, recipe, work, size * (m * k + k * n) + 2 * m * n),
            seconds=us * 1e-6,
            shapes=_names(rows, "m", "n", "k"),
        )


def _roofline(chip: Gpu, recipe: str, work: Floats, moved: Floats) -> Floats:
    peak = chip.peaks["bf16" if recipe == "bf16" else "fp8"]
    return 4e-6 + work / (0.7 * peak) + moved / chip.hbm


def _attention(folder: Path, name: str, chip: Gpu) -> Iterator[Table]:
    columns = _columns(folder, "attention", name)
    for kernel in sorted(set(columns["kernel"])):
        for width in sorted(set(columns["head_dim"])):
            rows = _rows(columns, kernel=kernel, head_dim=width, window=0)
            b, s, h, kv, us = _numbers(rows, "batch", "seq", "heads", "kv_heads", "latency_us")
            if len(us) < 500:  # noqa: PLR2004 too few for a surface
                continue
            work = 2 * b * s**2 * h * width
            moved = 4 * b * s * (h + kv) * width
            yield Table(
                kind="attention",
                variant=f"{kernel}_{width}",
                sizes=(s, b * h, b * kv),
                work=work,
                floor=_roofline(chip, "bf16", work / 0.7, moved),
                seconds=us * 1e-6,
                shapes=_names(rows, "batch", "seq", "heads", "kv_heads"),
            )
    rows = _columns(folder, "mla", name)
    b, s, h, us = _numbers(rows, "batch", "seq", "heads", "latency_us")
    work = 2 * b * s**2 * h * 160
    yield Table(
        kind="attention",
        variant="mla_160",
        sizes=(s, b * h, b * h),
        work=work,
        floor=_roofline(chip, "bf16", work / 0.7, 8 * b * s * h * 160),
        seconds=us * 1e-6,
        shapes=_names(rows, "batch", "seq", "heads"),
    )


# Exponent of the load of the fullest of `ep` ranks, by popularity; fitted to H100. On A100 the
# times show no such load.
_SKEW = {"balanced": 0.0, "power1.01": 0.56, "power1.2": 0.67}


# A layer of experts as trainers run it: balanced, with as many tokens for an expert or more.
# Such a shape counts as much as so many others.
_TRAINED, _COUNT = 64, 10.0


def _expert_layers(folder: Path, name: str, chip: Gpu) -> Iterator[Table]:
    columns = _columns(folder, "experts", name)
    for recipe in sorted(set(columns["precision"])):
        for gated in (True, False):
            rows = _rows(columns, precision=recipe, gated=gated)
            if len(rows["tokens"]):
                yield _experts(rows, recipe, chip, gated=gated)


def _experts(rows: dict[str, NDArray], recipe: str, chip: Gpu, *, gated: bool) -> Table:
    hidden, inter, topk, experts, tp, ep, tokens, us = _numbers(
        *(rows, "hidden", "inter", "topk", "experts", "tp", "ep", "tokens", "latency_us")
    )
    loads = _SKEW if "fp8" in chip.peaks else dict.fromkeys(_SKEW, 0.0)
    skew = np.array([loads[name] for name in rows["distribution"]])
    own = experts / ep
    most = tokens * np.minimum(topk, own)
    copies = np.clip(tokens * topk / ep * ep**skew, 1, np.maximum(most, 1))
    weights = hidden * inter / tp
    matrices = 3 if gated else 2
    work = 2 * matrices * copies * weights
    size = 2 if recipe == "bf16" else 1
    moved = size * matrices * weights * np.minimum(own, copies) + 8 * copies * hidden
    names = ("hidden", "inter", "topk", "experts", "tp", "ep", "distribution", "tokens")
    is_balanced = rows["distribution"] == "balanced"
    return Table(
        kind="experts",
        variant=recipe if gated else f"{recipe}_ungated",
        sizes=(copies, own, weights, tokens),
        work=work,
        floor=2e-5 + _roofline(chip, recipe, work / 0.8, moved),
        seconds=us * 1e-6,
        shapes=_names(rows, *names),
        usual=is_balanced & (copies >= _TRAINED * own),
    )


def _collectives(folder: Path, name: str, chip: Gpu) -> Iterator[Table]:
    columns = _columns(folder, "collectives", name)
    for op in sorted(set(columns["op"])):
        for ranks in sorted(set(columns["ranks"])):
            rows = _rows(columns, library="nccl", op=op, ranks=ranks)
            rows = {key: each[rows["dtype"] != "int8"] for key, each in rows.items()}
            size, us = _numbers(rows, "bytes", "latency_us")
            yield Table(
                kind="collectives",
                variant=f"{op}.{ranks}",
                sizes=(size,),
                work=size,
                floor=1e-5 + size / (0.75 * chip.nvlink),
                seconds=us * 1e-6,
                shapes=[f"{op},{ranks},{each:.0f}" for each in size],
            )


_KINDS: dict[str, Callable[[Path, str, Gpu], Iterator[Table]]] = {
    "gemm": _gemms,
    "attention": _attention,
    "experts": _expert_layers,
    "collectives": _collectives,
}


def fit(table: Table) -> Surface:
    """The surface of least absolute relative errors, smooth where there are no measurements."""
    shown = ~table.held_out
    sizes = tuple(size[shown] for size in table.sizes)
    axes = tuple(starmap(_knots, zip(_POWERS[table.kind], sizes, strict=True)))
    places, weights = corners(axes, sizes)
    points = np.broadcast_to(np.arange(places.shape[1]), places.shape)
    size = int(np.prod([len(axis) for axis in axes]))
    matrix = sparse.csr_matrix(
        (weights.ravel(), (points.ravel(), places.ravel())), shape=(places.shape[1], size)
    )
    # Unmeasured corners follow the roofline; its level is that of the measurements.
    prior = _prior(table, axes, matrix, np.log(table.floor[shown]))
    target = np.log(table.seconds[shown])
    stiffness = 0.02 if table.kind == "collectives" else 0.1
    bend = _bends([len(axis) for axis in axes]) * stiffness
    bend = bend + 1e-3 * sparse.identity(size)
    logs, trust = prior, np.ones(len(target))
    counts = 1.0 if table.usual is None else np.where(table.usual[shown], _COUNT, 1.0)
    for _ in range(15):
        weighted = matrix.T.multiply(trust * counts)
        right = weighted @ target + bend @ prior
        logs = spsolve((weighted @ matrix + bend).tocsc(), right)
        trust = 0.02 / np.maximum(np.abs(matrix @ logs - target), 0.02)
    rising = _rising(logs, [len(axis) for axis in axes])
    return Surface(axes=axes, logs=rising, growth=GROWTH[table.kind])


def _knots(powers: tuple[float, ...], sizes: Floats) -> tuple[float, ...]:
    """The knots of an axis: none beyond the largest measured size, which is the last one."""
    last = min(float(sizes.max()), float(powers[-1]))
    return (*(float(knot) for knot in powers if knot < last), last)


def _prior(table: Table, axes: tuple, matrix: sparse.csr_matrix, floor: Floats) -> Floats:
    """The logarithm of the roofline at all knots, fitted through the measured shapes."""
    grid = [mesh.ravel() for mesh in np.meshgrid(*map(np.log, axes), indexing="ij")]
    start = np.log(np.exp(floor).min())
    # The roofline is linear in the logarithms of the sizes above its start.
    design = np.column_stack([matrix @ each for each in grid] + [np.ones(len(floor))])
    slope = np.clip(np.linalg.lstsq(design, floor, rcond=None)[0], 0, None)
    level = np.median(floor - design[:, :-1] @ slope[:-1])
    return np.maximum(start, np.column_stack(grid) @ slope[:-1] + level)


def _bends(shape: list[int]) -> sparse.csr_matrix:
    """The quadratic form of second differences along each axis."""
    size = int(np.prod(shape))
    total = sparse.csr_matrix((size, size))
    for axis, length in enumerate(shape):
        if length < 3:  # noqa: PLR2004 a second difference takes three
            continue
        second = sparse.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(length - 2, length))
        before, after = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
        whole = sparse.kron(
            sparse.kron(sparse.identity(before), second), sparse.identity(after)
        )
        total = total + whole.T @ whole
    return total.tocsr()


def _rising(logs: Floats, shape: list[int]) -> Floats:
    """The mean of the nearest surfaces above and below that never fall with a size."""
    above = below = logs.reshape(shape)
    for axis in range(len(shape)):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return ((above + below) / 2).ravel()


def error(table: Table, surface: Surface) -> Floats:
    """Relative errors of a surface on all shapes of a table."""
    return surface.seconds(*table.sizes) / table.seconds - 1


def shipped(chip: Gpu, table: Table) -> Surface | None:
    """The surface of a GPU for a table; None if the package has none."""
    if table.kind == "collectives":
        op, _, ranks = table.variant.partition(".")
        return chip.collectives.get(op, {}).get(int(ranks))
    return getattr(chip, table.kind).get(table.variant)


def _toml(values: Floats) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def write(name: str, surfaces: list[tuple[Table, Surface]], errors: dict[str, float]) -> None:
    """Replace the surfaces in the file of a GPU; the lines of its data sheet stay."""
    path = GPUS / f"{name}.toml"
    sheet = path.read_text("utf-8").partition("\n[errors]")[0].rstrip() + "\n"
    parts = [sheet, "[errors]"]
    parts += [f"{kind} = {value:.3f}" for kind, value in errors.items()]
    for table, surface in surfaces:
        parts.append(f"\n[{table.kind}.{table.variant}]")
        axes = zip(_AXES[table.kind], surface.axes, strict=True)
        parts += [f"{axis} = {_toml(np.array(knots))}" for axis, knots in axes]
        parts.append(f"us = {_toml(np.exp(surface.logs) * 1e6)}")
    path.write_text("\n".join(parts) + "\n", "utf-8")


_CURVES = """\
# Of the InternEvo search, from the surfaces. FLOPs of a bf16 GEMM and its TFLOPS: median of
# square weights of 2048 to 8192. GEMMs of unfused attention: about half of the peak, an
# assumption. Causal FlashAttention, heads of 128, at 1K to 16K tokens.
[curves]
gemm = {gemm}
unfused_tflops = {unfused:.0f}
attention = {{ start_us = [{first:.1f}, {first:.1f}], \
element_ps = [{element:.3f}, {element_back:.3f}], tflops = [{rate:.1f}, {rate_back:.1f}] }}
"""


def curves(chip: Gpu) -> str:
    """The curves of the search in TOML, from the surfaces of a GPU."""
    knots = []
    for work in np.geomspace(1e9, 1e13, 9):
        shapes = [(work / (2 * h * h), h) for h in (2048, 4096, 8192)]
        times = [float(chip.matmul("bf16", m, h, h)) for m, h in shapes if m >= 16]  # noqa: PLR2004
        knots.append([float(f"{work:.3g}"), round(float(work / np.median(times)) / 1e12, 1)])
    seq = np.array([1024.0, 2048.0, 4096.0, 8192.0, 16384.0])
    times = np.array([float(chip.flash(chip.attention_kernel, 128, s, 32, 32)) for s in seq])
    first, factor = 10e-6, chip.attention_backward
    design = np.column_stack([seq * 4096, 2 * seq**2 * 4096]) / times[:, None]
    element, per_flop = np.clip(nnls(design, 1 - first / times)[0], 1e-18, None)
    return _CURVES.format(
        gemm=knots,
        unfused=chip.peaks["bf16"] / 2e12,
        first=first * 1e6,
        element=element * 1e12,
        element_back=element * factor * 1e12,
        rate=1e-12 / per_flop,
        rate_back=2.5 / factor * 1e-12 / per_flop,
    )


def links(chip: Gpu) -> tuple[float, float]:
    """Bus bandwidth (bytes/s) and start (s) of an NCCL all-gather of 512 MiB and of 512 B."""
    size, ranks = 2**29, max(chip.collectives["all_gather"])
    gather = float(chip.inside("all_gather", size, ranks))
    start = float(chip.inside("all_gather", 512, ranks))
    return size * (ranks - 1) / ranks / gather, start


def write_curves(name: str) -> None:
    """Replace the curves in the file of a GPU."""
    path = GPUS / f"{name}.toml"
    sheet, _, rest = path.read_text("utf-8").partition("\n[errors]")
    sheet = sheet.partition(_CURVES[:20])[0].rstrip()
    path.write_text(f"{sheet}\n\n{curves(gpu(name))}\n[errors]{rest}", "utf-8")


_LEAST = {"gemm": 1e9, "attention": 0.0, "experts": 0.0, "collectives": 65536.0}


def tables(folder: Path, name: str) -> Iterator[Table]:
    """All tables of a GPU that are in the folder."""
    for kind, read in _KINDS.items():
        if (folder / f"{kind}_{name}.parquet").exists():
            yield from read(folder, name, gpu(name))


Errors = dict[tuple[str, str], list[tuple[Floats, Floats]]]  # (work, errors) by kind and GPU


def fit_all(folder: Path) -> None:
    """Fit and write the surfaces of all GPUs, and their curves of the search."""
    for name in MEASURED:
        surfaces = [(table, fit(table)) for table in tables(folder, name)]
        own: dict[str, list[tuple[Floats, Floats]]] = {}
        for table, surface in surfaces:
            out = table.held_out
            own.setdefault(table.kind, []).append((table.work[out], error(table, surface)[out]))
        medians = {kind: _median(parts, _LEAST[kind]) for kind, parts in own.items()}
        write(name, surfaces, medians)
    gpu.cache_clear()
    for name in MEASURED:
        write_curves(name)


@cache
def errors(folder: Path, *, all_rows: bool = False) -> Errors:
    """The errors of shipped surfaces on the shapes held out, or on all rows of a folder."""
    all_errors: Errors = {}
    for name in gpus():
        for table in tables(folder, name):
            if surface := shipped(gpu(name), table):
                rows = slice(None) if all_rows else table.held_out
                own = all_errors.setdefault((table.kind, name), [])
                own.append((table.work[rows], error(table, surface)[rows]))
    return all_errors


def _median(parts: list[tuple[Floats, Floats]], least: float) -> float:
    off = np.concatenate([errors[work >= least] for work, errors in parts])
    return float(np.median(np.abs(off))) if len(off) else float("nan")


_SIZES = {
    "gemm": [10.0**power for power in (0, 7, 8, 9, 10, 11, 12, 13)],
    "attention": [10.0**power for power in (0, 7, 8, 9, 10, 11, 12, 13)],
    "experts": [10.0**power for power in (0, 7, 8, 9, 10, 11, 12, 13)],
    "collectives": [0.0, 4096.0, 65536.0, 2.0**20, 2.0**24, 2.0**28],
}
_HEADINGS = {
    "gemm": "GEMM, all recipes: FLOPs from",
    "attention": "Attention, forward, without windows: FLOPs from",
    "experts": "Layer of experts, forward: FLOPs from",
    "collectives": "NCCL collectives inside a node: bytes from",
}


def report(all_errors: Errors) -> str:
    """Tables of median absolute relative errors in %, by size."""
    parts = []
    for kind, sizes in _SIZES.items():
        own = {name: parts for (each, name), parts in all_errors.items() if each == kind}
        if not own:
            continue
        unit = [_bytes(size) if kind == "collectives" else f"{size:.0e}" for size in sizes]
        unit = [re.sub(r"e\+0?", "e", text) for text in unit]
        least = _LEAST[kind]
        all_of = f"all from {_bytes(least) if kind == 'collectives' else f'{least:.0e}'}"
        all_of = re.sub(r"e\+0?", "e", all_of) if least else "all"
        head = [_HEADINGS[kind], *(["less", *unit[1:]]), all_of, "90 % below", "shapes"]
        lines = [head, ["---", *["---:"] * (len(head) - 1)]]
        for name, pieces in own.items():
            work, off = (np.concatenate(each) for each in zip(*pieces, strict=True))
            cells = []
            for low, high in zip(sizes, [*sizes[1:], np.inf], strict=True):
                part = np.abs(off[(work >= low) & (work < high)])
                cells.append(f"{np.median(part) * 100:.1f}" if len(part) else "n/a")
            whole = np.abs(off[work >= least])
            cells += [f"{np.median(whole) * 100:.1f}", f"{np.percentile(whole, 90) * 100:.0f}"]
            lines.append([name.upper(), *cells, str(len(off))])
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


def _bytes(size: float) -> str:
    for unit, shown in ((2**20, "Mi"), (2**10, "Ki")):
        if size >= unit:
            return f"{size / unit:.0f} {shown}B"
    return f"{size:.0f} B"


_HEAD = """\
# Measured hardware: how far off

How far are predicted times of kernels and collectives from measured ones? This page is for
readers who judge `fastcomm plan price`. `docs/hardware_accuracy.py` fits surfaces to four
fifths of the shapes that NVIDIA AIConfigurator measured (Apache-2.0; not part of fastcomm),
and writes this page: median absolute errors in % on the other fifth, by size. "90 % below" is
the 90th percentile.

A surface is a grid of times at knots: 20 to 2000 numbers for 20 to 30 000 measurements. Between
the knots the logarithm of the time is linear in the logarithms of the sizes. Times never fall
with a size. The last knot is the largest measured size; beyond, times grow with the work, and
no time is below that of the peak or of the links. Layers of experts as trainers run them
(balanced, 64 tokens for an expert or more) count ten times as much as others. How popular
experts load the fullest rank was chosen on H100, with the shapes held out.

H200, H800, B300, GB300 and A100 with 40 GB have no measurements of their own: their kernels are
those of H100, B200, GB200 and A100, and links are scaled by data sheets. Output says so.
"""


def page(folder: Path) -> str:
    """The whole page."""
    return f"{_HEAD}\n{report(errors(folder))}\n"


if __name__ == "__main__":
    where = Path(sys.argv[-1])
    if "--check" in sys.argv:
        sys.stdout.write(report(errors(where, all_rows=True)) + "\n")
    else:
        fit_all(where)
        PAGE.write_text(page(where), "utf-8")
