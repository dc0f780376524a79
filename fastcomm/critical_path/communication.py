"""The communication of several ranks in one table of columns, matched across them.

All of it is matched, whatever the window: what a window cuts off on one rank alone would else
look lost. Rows are those of the ranks' `comm`, rank behind rank.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.critical_path.parts import Part, parts
from fastcomm.trace import clocks
from fastcomm.trace.matching import NONE, UNKNOWN, Calls, Matches, match
from fastcomm.trace.schema import ENDS_TOGETHER, EVEN, OP, numbers
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Column, Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Columns of all rows; UNKNOWN for null."""

    traces: Mapping[int, Trace]
    table: pa.Table
    rank: Column
    group: Column  # a label that is the same on every rank; UNKNOWN where nothing tells one
    op: NDArray[np.int8]
    stop: Column
    directed: Column  # rows of messages of which it is known who sends and who receives
    together: Column  # rows that are matched as collectives
    matches: Matches  # of these

    @classmethod
    def of(cls, traces: Mapping[int, Trace]) -> "Communication":
        """Put the ranks one behind the other, and match their collectives."""
        tables = [trace.comm.select(_COLUMNS) for trace in traces.values()]
        table = pa.concat_tables(tables).combine_chunks()
        rank = np.repeat(np.array(list(traces), np.int64), [each.num_rows for each in tables])
        group = np.concatenate([_labels(trace) for trace in traces.values()])
        op, stop = table["op"].to_numpy(), table["stop"].to_numpy()
        directed = (op == OP["SendRecv"]) & table["sends_to"].is_valid().to_numpy()
        together = np.flatnonzero((group != UNKNOWN) & ~directed)
        size = np.where(np.isin(op, numbers(EVEN)), filled(table["payload_bytes"]), UNKNOWN)
        calls = Calls(
            rank=rank[together],
            group=group[together],
            op=op[together].astype(np.int64),
            seq=filled(table["seq"])[together],
            size=size[together],
            stop=stop[together],
            root=filled(table["root"])[together],
        )
        return cls(
            traces=traces,
            table=table,
            rank=rank,
            group=group,
            op=op,
            stop=stop,
            directed=np.flatnonzero((group != UNKNOWN) & directed),
            together=together,
            matches=match(calls),
        )

    def ahead(self) -> dict[int, int]:
        """What each clock is ahead of its reference, where that is beyond doubt; else 0."""
        rows = self.together[self.matches.instance != NONE]
        number = self.matches.instance[self.matches.instance != NONE]
        ends = np.isin(self.op[rows], numbers(ENDS_TOGETHER))
        rows, number = rows[ends], number[ends]
        found = clocks.offsets_of(self.rank[rows], self.group[rows], number, self.stop[rows])
        known = {each.rank: each.offset_ns for each in found if each.applies}
        return {rank: known.get(rank, 0) for rank in self.traces}

    def members(self, counts: Flags, ahead: Mapping[int, int]) -> Iterator[Sequence[Part]]:
        """The parts of each collective, of those rows that count: of two ranks or more."""
        matched = self.matches.instance != NONE
        matched &= counts[self.together]
        rows, number = self.together[matched], self.matches.instance[matched]
        several = np.bincount(number, minlength=self.matches.count) > 1
        rows, number = rows[several[number]], number[several[number]]
        found: dict[int, list[Part]] = defaultdict(list)
        for key, part in zip(number.tolist(), self.parts(rows, ahead), strict=True):
            found[key].append(part)
        yield from found.values()

    def parts(self, rows: Column, ahead: Mapping[int, int]) -> Iterator[Part]:
        """What these rows are on their ranks; in order of the rows, which are sorted."""
        first = 0
        for rank, trace in self.traces.items():
            behind = first + trace.comm.num_rows
            own = rows[(rows >= first) & (rows < behind)] - first
            yield from parts(rank, trace, own, ahead[rank])
            first = behind

    def alone(self, counts: Flags) -> int:
        """How many collectives are on one rank alone of several of its group that were read."""
        missing = (self.matches.instance == NONE) & (self.matches.refused == NONE)
        missing &= counts[self.together] & (self.op[self.together] != OP["SendRecv"])
        group, rank = self.group[self.together], self.rank[self.together]
        known = np.unique(np.stack([group, rank]), axis=1)[0]
        several, times = np.unique(known, return_counts=True)
        return int((missing & np.isin(group, several[times > 1])).sum())

    def refused(self, counts: Flags) -> int:
        """How many collectives say another size or root on one rank than on another."""
        refused = self.matches.refused[counts[self.together]]
        return len(np.unique(refused[refused != NONE]))


_COLUMNS = ("op", "stop", "seq", "payload_bytes", "root", "sends_to", "receives_from")


def _labels(trace: Trace) -> Column:
    """The label of the group of each row."""
    label = pa.array(clocks.labels(trace.groups, described=True), pa.int64())
    return filled(label.take(trace.comm["group"].combine_chunks()))


def filled(column: pa.Array) -> Column:
    """A column of whole numbers, UNKNOWN for null."""
    found: Column = column.cast(pa.int64()).fill_null(UNKNOWN).to_numpy(zero_copy_only=False)
    return found
