"""Strategies that fit, as columns, the best first; where none fits, what excludes them all."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.isp.question import ALGOS, Question
from fastcomm.units import format_gib

if TYPE_CHECKING:
    import pyarrow as pa

Column = NDArray[Any]
Fields = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class FeasibleCells:
    """The kept cells of a block: their places, row by row, and the block's fields."""

    shape: tuple[int, int]
    cells: NDArray[np.int64]
    fields: Fields

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each cell."""
        rows = np.repeat(np.arange(self.shape[0]), self._widths)
        return rows, self.cells - rows * self.shape[1]

    @property
    def _widths(self) -> NDArray[np.int64]:
        edges = np.arange(self.shape[0] + 1) * self.shape[1]
        return np.diff(np.searchsorted(self.cells, edges))

    def axis(self, name: str) -> str:
        """What a field depends on: the part, its rows, its columns, or each cell."""
        value = np.asarray(self.fields[name])
        if value.size == 1:
            return "part"
        if value.ndim == 1 or value.shape[0] == 1:
            return "column"
        return "row" if value.shape[1] == 1 else "cell"

    def along(self, name: str, axis: str) -> Column:
        """One field, once for each value of an axis that it depends on at most."""
        if axis == "cell":
            return self.column(name)
        lengths = {"part": 1, "row": self.shape[0], "column": self.shape[1]}
        return np.broadcast_to(np.asarray(self.fields[name]).reshape(-1), lengths[axis])

    def column(self, name: str) -> Column:
        """One field of all kept cells."""
        value, axis = np.asarray(self.fields[name]), self.axis(name)
        if axis == "part":
            return np.full(len(self.cells), value.reshape(-1)[0])
        if axis == "cell":
            return value.reshape(-1).take(self.cells)
        rows, columns = self.places
        return value.reshape(-1).take(rows if axis == "row" else columns)

    def value(self, name: str, place: int) -> Any:
        """One field of one kept cell."""
        row, column = divmod(int(self.cells[place]), self.shape[1])
        return np.broadcast_to(np.asarray(self.fields[name]), self.shape)[row, column].item()


def kept(shape: tuple[int, int], mask: NDArray[np.bool_], fields: Fields) -> FeasibleCells:
    """The part of a block that fits."""
    return FeasibleCells(shape, np.flatnonzero(mask.reshape(-1)), fields)


@dataclass(frozen=True, slots=True)
class Records:
    """All feasible strategies by TGS, highest first; equals in the order of enumeration."""

    parts: tuple[FeasibleCells, ...]
    # For each place of the ranking, the cell among all parts' cells.
    ranking: NDArray[np.int64]
    _made: dict[str, Column] = field(default_factory=dict)
    # For each place of the ranking, which value of an axis is its own, among all parts' values.
    _indices: dict[str, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: list[FeasibleCells]) -> "Records":
        """Rank them."""
        if not parts:
            return cls((), np.zeros(0, np.int64))
        tgs, *order = (
            np.concatenate([part.column(name) for part in parts])
            for name in ("tgs", "order")
            if name in parts[0].fields
        )
        ranking = np.lexsort((*order, -tgs)) if order else np.argsort(-tgs, kind="stable")
        return cls(tuple(parts), ranking)

    def __len__(self) -> int:
        return len(self.ranking)

    def __iter__(self) -> Iterator[str]:
        names = self.parts[0].fields if self.parts else ()
        return (name for name in names if name != "order")

    def __getitem__(self, name: str) -> Column:
        if not self.parts:
            return np.zeros(0)
        if name not in self._made:
            axis = self._axis(name)
            values = np.concatenate([part.along(name, axis) for part in self.parts])
            self._made[name] = values.take(self._index(axis))
        return self._made[name]

    def _axis(self, name: str) -> str:
        """What a field depends on in any part; rows here and columns there make it a cell's."""
        found = {part.axis(name) for part in self.parts} - {"part"}
        return "part" if not found else found.pop() if len(found) == 1 else "cell"

    def _index(self, axis: str) -> Column:
        if axis == "cell":
            return self.ranking
        if axis not in self._indices:
            found, begun = [], 0
            for part in self.parts:
                own = {"part": np.zeros(len(part.cells), np.int64)}
                own |= dict(zip(("row", "column"), part.places, strict=True))
                found.append(own[axis] + begun)
                begun += {"part": 1, "row": part.shape[0], "column": part.shape[1]}[axis]
            self._indices[axis] = np.concatenate(found)[self.ranking]
        return self._indices[axis]

    def row(self, place: int) -> dict[str, Any]:
        """One strategy, by its place in the ranking."""
        cell = int(self.ranking[place])
        for part in self.parts:
            if cell < len(part.cells):
                return {name: part.value(name, cell) for name in self}
            cell -= len(part.cells)
        raise IndexError(place)


def nearest(
    question: Question,
    rejected: dict[str, int],
    least_memory: float | None,
    unsuited: tuple[int, ...],
) -> str:
    """One sentence, by what a search has counted."""
    if least_memory is not None:
        need = format_gib(least_memory)
        return f"nothing fits: the least memory that any strategy needs is {need}"
    if unsuited:
        unit = min(unsuited) * question.seq_len
        near = max(unit, round(question.batch.most / unit) * unit)
        return (
            f"no strategy: global batch {question.batch.most} is no multiple of "
            f"data-parallel degree x sequence length for any of them; {near} would be"
        )
    if rejected.get("schedule"):
        return (
            "no strategy: each has fewer micro-batches than pipeline stages; a smaller pp, a "
            "larger global batch or --any-schedule would work"
        )
    fell = [f"{count} by {reason}" for reason, count in rejected.items() if count]
    return f"no strategy: rejected {', '.join(fell)}" if fell else _degrees(question)


def _degrees(question: Question) -> str:
    """Which degree that was asked for divides nothing that it has to."""
    layers = {question.model.layers}
    stages = [pp for pp in question.pp or (1,) if question.model.layers % pp == 0]
    wholes = {
        "pp": (question.pp, set(question.world_sizes)),
        "sp": (question.sp, _over(question.world_sizes, question.pp)),
        "ep": (question.ep, _over(question.world_sizes, question.pp)),
        "interleave": (question.interleave, _over(layers, stages)),
    }
    for name, (asked, whole) in wholes.items():
        if asked and not any(each % degree == 0 for each in whole for degree in asked):
            most = max(whole, default=1)
            near = max(n for n in range(1, min(asked) + 1) if most % n == 0)
            parts = " or ".join(str(each) for each in sorted(whole)) or "one layer"
            return (
                f"no strategy: {name} {', '.join(map(str, asked))} does not divide {parts} "
                f"({_WHOLES[name]}); the nearest below is {near}"
            )
    return "no strategy: no pp, sp, ep and interleave divide the GPUs and layers together"


_WHOLES = {
    "pp": "GPUs",
    "sp": "GPUs of a stage",
    "ep": "GPUs of a stage",
    "interleave": "layers of a stage",
}


def _over(wholes: Iterable[int], parts: Iterable[int] | None) -> set[int]:
    return {each // part for each in wholes for part in parts or (1,) if each % part == 0}


# Numbers of a record that count things.
_WHOLE = (
    *("pp", "sp", "wp_size", "zp_size", "seq_len", "micro_bsz", "micro_num"),
    *("activation_ckpt", "world_size", "g_bsz", "p_para", "p_grads", "p_os"),
    *("ep", "interleave", "slowest_stage"),
)
# What a point of the front says of its strategy.
_SHORT = (
    *("algo_type", "world_size", "pp", "interleave", "sp", "ep", "wp_size", "zp_size"),
    *("p_para", "p_grads", "p_os"),
    *("micro_bsz", "micro_num", "activation_ckpt", "tgs", "total_latency", "total_mm_cost"),
)
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer to a question; `columns` has the feasible strategies by TGS, highest first."""

    question: Question
    cluster: str
    mode: str
    candidates: int
    rejected: dict[str, int]
    # The least memory that any candidate needs; None where none got as far.
    least_memory: float | None
    columns: Records
    # Data-parallel degrees that the batch does not suit.
    unsuited: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> int:
        """How many strategies fit."""
        return len(self.columns)

    def record(self, place: int) -> Record:
        """One strategy, by its place in the ranking from 0."""
        row = self.columns.row(place)
        row |= {name: int(row[name]) for name in _WHOLE if name in row}
        return row | {"algo_type": ALGOS[int(row.pop("algo"))]}

    def best(self, count: int = 6) -> list[Record]:
        """The first of the ranking."""
        return [self.record(place) for place in range(min(count, self.feasible))]

    def best_by_algo(self) -> dict[str, Record]:
        """The first of each algorithm."""
        return self._first_of("algo", lambda value: ALGOS[int(value)])

    def best_by_world(self) -> dict[int, Record]:
        """The first of each world size."""
        return self._first_of("world_size", int)

    def _first_of(self, name: str, key: Any) -> dict[Any, Record]:
        if not self.feasible:
            return {}
        values, places = np.unique(self.columns[name], return_index=True)
        order = np.argsort(places)
        return {key(values[at]): self.record(int(places[at])) for at in order}

    def pareto(self) -> list[Record]:
        """Strategies that no other beats in both TGS and memory; the fastest first."""
        if not self.feasible:
            return []
        memory = self.columns["total_mm_cost"]
        # Of equally fast ones the smallest comes first, and so rules the others out.
        order = np.lexsort((memory, -self.columns["tgs"]))
        least = np.minimum.accumulate(memory[order])
        smaller = np.concatenate([[True], least[1:] < least[:-1]])
        return [self.record(int(place)) for place in order[smaller]]

    def nearest(self) -> str:
        """Where nothing fits: what kept it out, and the nearest that would work."""
        return nearest(self.question, self.rejected, self.least_memory, self.unsuited)

    def to_arrow(self) -> "pa.Table":
        """All feasible strategies."""
        import pyarrow as pa

        columns = {name: self.columns[name] for name in self.columns if name != "algo"}
        if self.feasible:
            places = self.columns["algo"].astype(np.int8)
            words = pa.DictionaryArray.from_arrays(pa.array(places), pa.array(ALGOS))
            return pa.table({"algo_type": words, **columns})
        return pa.table({"algo_type": pa.array([], pa.string())})

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """`to_arrow` for whatever takes Arrow's PyCapsules: pandas, Polars, DuckDB."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_dict(self, count: int = 6) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "mode": self.mode,
            "cluster": self.cluster,
            "model": self.question.model.name,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "rejected": self.rejected,
            "least_memory": self.least_memory,
            "best": self.best(count),
            "best_by_algo": self.best_by_algo(),
            "best_by_world": {str(n): best for n, best in self.best_by_world().items()},
            "pareto": [
                {name: row[name] for name in _SHORT if name in row} for row in self.pareto()
            ],
            "notes": list(self.notes),
        }
