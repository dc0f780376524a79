"""What a search found: feasible strategies, the best first, and why others fell out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcomm.isp.columns import Records
from fastcomm.isp.nearest import nearest
from fastcomm.isp.question import ALGOS, Question

if TYPE_CHECKING:
    import pyarrow as pa

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
class Found:
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
