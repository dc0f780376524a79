"""Feasible strategies as columns, ranked by tokens/s/GPU.

Columns are in seconds and bytes, under the names of the original simulator; `with_units`
converts them for JSON and tables.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.checks import invalid_value
from fastcomm.isp.problem import ALGOS, SearchProblem
from fastcomm.isp.space import nearest
from fastcomm.result import TableResult
from fastcomm.units import format_s

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcomm.hardware.calibration import Calibration

RecordColumn = NDArray[Any]
Fields = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class FeasibleCells:
    """The feasible cells of a grid of strategies, and the fields of the whole grid.

    A cell is numbered row by row. Each field is an array that broadcasts to `shape`.
    """

    shape: tuple[int, int]
    cells: NDArray[np.int64]
    fields: Fields

    @classmethod
    def of(
        cls, shape: tuple[int, int], mask: NDArray[np.bool_], fields: Fields
    ) -> "FeasibleCells":
        """Select the feasible cells of a grid.

        Parameters
        ----------
        shape
            Rows and columns of the grid.
        mask
            Of this shape: whether a cell is feasible.
        fields
            Values by name; each broadcasts to the shape.

        """
        return cls(shape, np.flatnonzero(mask.reshape(-1)), fields)

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column in the grid of each feasible cell."""
        rows = np.repeat(np.arange(self.shape[0]), self._widths)
        return rows, self.cells - rows * self.shape[1]

    @property
    def _widths(self) -> NDArray[np.int64]:
        """Number of feasible cells in each row."""
        edges = np.arange(self.shape[0] + 1) * self.shape[1]
        return np.diff(np.searchsorted(self.cells, edges))

    def axis(self, name: str) -> str:
        """Return what a field depends on: "part" (nothing), "row", "column", "cell" (both)."""
        value = np.asarray(self.fields[name])
        if value.size == 1:
            return "part"
        if value.ndim == 1 or value.shape[0] == 1:
            return "column"
        return "row" if value.shape[1] == 1 else "cell"

    def along(self, name: str, axis: str) -> RecordColumn:
        """Return a field once for each value of an axis.

        The field may depend on no other axis, see `axis`.
        """
        if axis == "cell":
            return self.column(name)
        lengths = {"part": 1, "row": self.shape[0], "column": self.shape[1]}
        return np.broadcast_to(np.asarray(self.fields[name]).reshape(-1), lengths[axis])

    def column(self, name: str) -> RecordColumn:
        """Return a field of every feasible cell, a value each; `name` is a key of `fields`."""
        value, axis = np.asarray(self.fields[name]), self.axis(name)
        if axis == "part":
            return np.full(len(self.cells), value.reshape(-1)[0])
        if axis == "cell":
            return value.reshape(-1).take(self.cells)
        rows, columns = self.places
        return value.reshape(-1).take(rows if axis == "row" else columns)

    def value(self, name: str, place: int) -> Any:
        """Return a field of one cell, by its index among the feasible cells."""
        row, column = divmod(int(self.cells[place]), self.shape[1])
        return np.broadcast_to(np.asarray(self.fields[name]), self.shape)[row, column].item()


@dataclass(frozen=True, slots=True)
class Records:
    """All feasible strategies, ranked by tokens/s/GPU, ties in the order of enumeration."""

    parts: tuple[FeasibleCells, ...]
    # Index of each ranked strategy among the cells of all parts.
    ranking: NDArray[np.int64]
    # Ranked columns by name, filled on demand.
    _columns: dict[str, RecordColumn] = field(default_factory=dict)
    # By axis, the index of each ranked strategy among the values of all parts.
    _indices: dict[str, RecordColumn] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: list[FeasibleCells]) -> "Records":
        """Rank the cells of all parts."""
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

    def __getitem__(self, name: str) -> RecordColumn:
        if not self.parts:
            return np.zeros(0)
        if name not in self._columns:
            axis = self._axis(name)
            values = np.concatenate([part.along(name, axis) for part in self.parts])
            self._columns[name] = values.take(self._index(axis))
        return self._columns[name]

    def _axis(self, name: str) -> str:
        """Return the axis along which a field differs; "part" is none, "cell" is both."""
        axes = {part.axis(name) for part in self.parts} - {"part"}
        return "part" if not axes else axes.pop() if len(axes) == 1 else "cell"

    def _index(self, axis: str) -> RecordColumn:
        """Return the index of each ranked strategy among the values of an axis in all parts."""
        if axis == "cell":
            return self.ranking
        if axis not in self._indices:
            indices, offset = [], 0
            for part in self.parts:
                by_axis = {"part": np.zeros(len(part.cells), np.int64)}
                by_axis |= dict(zip(("row", "column"), part.places, strict=True))
                indices.append(by_axis[axis] + offset)
                offset += {"part": 1, "row": part.shape[0], "column": part.shape[1]}[axis]
            self._indices[axis] = np.concatenate(indices)[self.ranking]
        return self._indices[axis]

    def row(self, place: int) -> dict[str, Any]:
        """Return the fields of one strategy, by its place in the ranking, from 0.

        Raises IndexError if there is no such place.
        """
        cell = int(self.ranking[place])
        for part in self.parts:
            if cell < len(part.cells):
                return {name: part.value(name, cell) for name in self}
            cell -= len(part.cells)
        raise IndexError(place)


# Fields of a record that are integers.
_WHOLE = (
    *("pp", "sp", "wp_size", "zp_size", "seq_len", "micro_bsz", "micro_num"),
    *("activation_ckpt", "world_size", "g_bsz", "p_para", "p_grads", "p_os"),
    *("ep", "interleave", "slowest_stage"),
)
# Fields of a strategy of the Pareto front.
_SHORT = (
    *("algo_type", "world_size", "pp", "interleave", "sp", "ep", "wp_size", "zp_size"),
    *("p_para", "p_grads", "p_os"),
    *("micro_bsz", "micro_num", "activation_ckpt", "tgs", "total_latency", "total_mm_cost"),
)
Record = dict[str, Any]
# Fields in seconds and in bytes.
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
    """Return the fields of a record or table in ns and bytes, with units in their names."""
    converted = {}
    for name, value in fields.items():
        if name in _TIMES:
            converted[f"{name}_ns"] = value * _NS
        elif name == "tgs":
            converted["tokens_per_s_per_gpu"] = value
        else:
            converted[f"{name}_bytes" if name in _SIZES else name] = value
    return converted


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareChange:
    """The best strategy of a cluster that differs in one thing."""

    name: str
    best: Record | None
    # Relative gain of tokens/s/GPU; None if this or the unchanged cluster has no strategy.
    gain: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as a JSON object."""
        best = self.best and with_units(self.best)
        return {"what": self.name, "best": best, "gain": self.gain}


# Keys of "chosen", and the fields that they have here under other names.
_CHOSEN = (
    *("algo_type", "seq_len", "micro_num", "micro_bsz", "pp_size", "tp_size"),
    *("wp_size", "zp_size", "activation_ckpt"),
)
_FIELDS = {"pp_size": "pp", "tp_size": "sp"}


def _chosen(record: Record) -> dict[str, object]:
    """Return a strategy by the names of its sizes in a configuration of InternEvo's search."""
    values = {name: record[_FIELDS.get(name, name)] for name in _CHOSEN}
    return values | ({"ep_size": record["ep"]} if "ep_comm_cost" in record else {})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(TableResult):
    """Result of a search; `columns` has the feasible strategies, ranked by tokens/s/GPU."""

    problem: SearchProblem
    cluster: str
    mode: str
    candidates: int
    rejected: dict[str, int]  # candidates by reason
    least_memory: float | None  # bytes of the smallest candidate; None without candidates
    columns: Records
    unsuited: tuple[int, ...] = ()  # data-parallel degrees that the global batch rules out
    notes: tuple[str, ...] = ()
    calibration: "Calibration | None" = None
    sensitivity: tuple[HardwareChange, ...] | None = None
    top: int = 6  # number of strategies in the JSON document
    explanation: Mapping[str, Any] | None = None  # see `explanation.explanation`
    trainer_args: str | None = None  # see `explanation.snippet`

    @property
    def feasible(self) -> int:
        """Number of feasible strategies."""
        return len(self.columns)

    def record(self, place: int) -> Record:
        """Return the fields of one strategy, by its place in the ranking from 0.

        Raises ConfigError if no strategy has this place.
        """
        if not isinstance(place, int) or not 0 <= place < self.feasible:
            expected = f"a place from 0 in the ranking of {self.feasible} strategies"
            raise invalid_value("record: place", place, expected)
        row = self.columns.row(place)
        row |= {name: int(row[name]) for name in _WHOLE if name in row}
        return row | {"algo_type": ALGOS[int(row.pop("algo"))]}

    def best(self, count: int = 6) -> list[Record]:
        """Return the `count` fastest strategies."""
        return [self.record(place) for place in range(min(count, self.feasible))]

    def best_by_algo(self) -> dict[str, Record]:
        """Return the fastest strategy of each algorithm."""
        return self._first_of("algo", lambda value: ALGOS[int(value)])

    def best_by_world(self) -> dict[int, Record]:
        """Return the fastest strategy of each world size."""
        return self._first_of("world_size", int)

    def _first_of(self, name: str, key: Any) -> dict[Any, Record]:
        """Return the fastest strategy per value of a column, by `key` of the value."""
        if not self.feasible:
            return {}
        values, places = np.unique(self.columns[name], return_index=True)
        order = np.argsort(places)
        return {key(values[at]): self.record(int(places[at])) for at in order}

    def pareto(self) -> list[Record]:
        """Return the strategies that no other beats in both speed and memory.

        The fastest comes first, the smallest last.
        """
        if not self.feasible:
            return []
        memory = self.columns["total_mm_cost"]
        # Of equally fast strategies the smallest comes first, and so excludes the others.
        order = np.lexsort((memory, -self.columns["tgs"]))
        least = np.minimum.accumulate(memory[order])
        smaller = np.concatenate([[True], least[1:] < least[:-1]])
        return [self.record(int(place)) for place in order[smaller]]

    def nearest(self) -> str:
        """Explain why no strategy is feasible, and the nearest change that helps."""
        return nearest(self.problem, self.rejected, self.least_memory, self.unsuited)

    def json_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of a strategy with the names and units of the JSON document."""
        return with_units(fields)

    def to_arrow(self) -> "pa.Table":
        """Return a row per feasible strategy, ranked, with names and units as in JSON."""
        import pyarrow as pa

        columns = {name: self.columns[name] for name in self.columns if name != "algo"}
        if self.feasible:
            places = self.columns["algo"].astype(np.int8)
            algorithms = pa.DictionaryArray.from_arrays(pa.array(places), pa.array(ALGOS))
            return pa.table({"algo_type": algorithms, **self.json_fields(columns)})
        return pa.table({"algo_type": pa.array([], pa.string())})

    def figures(self) -> dict[str, str]:
        """Return the model, the cluster, the number of strategies and the best one."""
        figures = {"model": self.problem.model.name, "cluster": self.cluster}
        figures["feasible"] = f"{self.feasible} of {self.candidates}"
        for best in self.best(1):
            batches = f"{best['micro_num']} x {best['micro_bsz']}"
            layout = f"pp {best['pp']}, sp {best['sp']}, batches {batches}"
            figures["best"] = f"{best['algo_type'].upper()} ({layout})"
            figures["step"] = format_s(best["total_latency"])
        return figures

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        by_algo, by_world = self.best_by_algo(), self.best_by_world()
        calibration = self.calibration
        chosen = {"chosen": _chosen(self.record(0))} if self.feasible else {}
        changes = [change.to_dict() for change in self.sensitivity or ()]
        return {
            "mode": self.mode,
            "cluster": self.cluster,
            "model": self.problem.model.name,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "rejected": self.rejected,
            **self.json_fields({"least_memory": self.least_memory}),
            "best": [self.json_fields(record) for record in self.best(self.top)],
            "best_by_algo": {n: self.json_fields(best) for n, best in by_algo.items()},
            "best_by_world": {str(n): self.json_fields(best) for n, best in by_world.items()},
            "pareto": [
                self.json_fields({name: row[name] for name in _SHORT if name in row})
                for row in self.pareto()
            ],
            "notes": [*self.notes, *(calibration.skipped if calibration else ())],
            **chosen,
            **(calibration.to_dict() if calibration else {}),
            **({} if self.sensitivity is None else {"sensitivity": changes}),
            **({} if self.explanation is None else {"explanation": self.explanation}),
            **({} if self.trainer_args is None else {"trainer_args": self.trainer_args}),
        }
