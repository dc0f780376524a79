"""Strategies that fit, as columns, the best first; where none fits, what excludes them all."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.isp import ALGOS, Question
from fastcomm.isp.space import nearest
from fastcomm.result import TableResult
from fastcomm.units import format_s

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcomm.hardware.calibration import Calibration

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


# Of a record, in seconds and in bytes.
_TIMES = frozenset(
    [
        *("all_fwd_bwd_cost", "bubble", "comp_attn", "comp_wp", "dense_layer", "elementwise"),
        *("ep_comm_cost", "ep_exposed", "fwd_bwd_cost", "grad_sync", "head", "optimizer"),
        *("overlap_latency", "p2p", "param_sync", "pp_comm_cost", "sp_comm_cost"),
        *("total_latency", "wdp_comm_cost", "wp_comm_cost", "zp_comm_cost"),
    ]
)
_SIZES = frozenset(
    [
        *("activation", "backward_mem_peak", "block_output_activation", "blocks_activation"),
        *("head_input_activation", "head_output_activation", "least_memory", "mem_pool_mm"),
        *("norm_activation", "os_mm_cost", "p_g_mm_cost", "pp_p2p_buffer"),
        *("rotary_emb_sincos_cache_mm", "step_peak", "total_mm_cost"),
    ]
)
_NS = 1e9


def with_units(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record or a table in ns and bytes, under names that say so."""
    found = {}
    for name, value in fields.items():
        if name in _TIMES:
            found[f"{name}_ns"] = value * _NS
        elif name == "tgs":
            found["tokens_per_s_per_gpu"] = value
        else:
            found[f"{name}_bytes" if name in _SIZES else name] = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareChange:
    """The best strategy of a cluster that differs in one thing."""

    what: str
    best: Record | None
    # Of the rate, over that of the cluster as it is; None where one of them has no strategy.
    gain: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as it stands in JSON."""
        return {**asdict(self), "best": self.best and with_units(self.best)}


def original(record: Record) -> dict[str, object]:
    """The chosen configuration, in the original's shape; with the spread of experts, if any."""
    spread = {"ep_size": record["ep"]} if "ep_comm_cost" in record else {}
    return {
        "algo_type": record["algo_type"],
        "seq_len": record["seq_len"],
        "micro_num": record["micro_num"],
        "micro_bsz": record["micro_bsz"],
        "pp_size": record["pp"],
        "tp_size": record["sp"],
        "wp_size": record["wp_size"],
        "zp_size": record["zp_size"],
        "activation_ckpt": record["activation_ckpt"],
        **spread,
    }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(TableResult):
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
    calibration: "Calibration | None" = None
    sensitivity: tuple[HardwareChange, ...] | None = None
    top: int = 6  # how many strategies the JSON lists

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

    @property
    def is_compat(self) -> bool:
        """Whether fields are those of the original simulator, in seconds."""
        return self.mode != "default"

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return dict(fields) if self.is_compat else with_units(fields)

    def to_arrow(self) -> "pa.Table":
        """Return a row per feasible strategy."""
        import pyarrow as pa

        columns = {name: self.columns[name] for name in self.columns if name != "algo"}
        if self.feasible:
            places = self.columns["algo"].astype(np.int8)
            words = pa.DictionaryArray.from_arrays(pa.array(places), pa.array(ALGOS))
            return pa.table({"algo_type": words, **self._named(columns)})
        return pa.table({"algo_type": pa.array([], pa.string())})

    def figures(self) -> dict[str, str]:
        """Return the model, the cluster, and the best strategy of how many."""
        found = {"model": self.question.model.name, "cluster": self.cluster}
        found["feasible"] = f"{self.feasible} of {self.candidates}"
        for best in self.best(1):
            layout = ("pp", "sp", "wp_size", "zp_size", "micro_bsz")
            degrees = ", ".join(f"{name} {best[name]}" for name in layout)
            found["best"] = f"{best['algo_type']} ({degrees})"
            found["step"] = format_s(best["total_latency"])
        return found

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        by_world, known = self.best_by_world(), self.calibration
        chosen = {"chosen": original(self.record(0))} if self.feasible else {}
        changes = [change.to_dict() for change in self.sensitivity or ()]
        return {
            "mode": self.mode,
            "cluster": self.cluster,
            "model": self.question.model.name,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "rejected": self.rejected,
            **self._named({"least_memory": self.least_memory}),
            "best": [self._named(each) for each in self.best(self.top)],
            "best_by_algo": {n: self._named(best) for n, best in self.best_by_algo().items()},
            "best_by_world": {str(n): self._named(best) for n, best in by_world.items()},
            "pareto": [
                self._named({name: row[name] for name in _SHORT if name in row})
                for row in self.pareto()
            ],
            "notes": [*self.notes, *(known.skipped if known else ())],
            **chosen,
            **(known.to_dict() if known else {}),
            **({} if self.sensitivity is None else {"sensitivity": changes}),
        }
