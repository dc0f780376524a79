"""The rows of one rank of a table of operations: what each is, and what it communicates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.readers.device_rows import Calls, Work
from fastcomm.readers.patterns import Named
from fastcomm.readers.table_mapping import WORK, Kind, TableMapping
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import Group, TagRule
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]

_NOTHING = Kind(pattern="", work="other")
_NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the whole table says of one rank."""

    rank: int
    world_size: int | None
    # By the columns in which ranks agree: a label, and the ranks that agree with this one.
    peers: Mapping[tuple[str, ...], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by the group's label
    # What to add to the times of an iteration, where they count from its begin.
    shifts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows and their kinds; `code` is the place of a row's kind in `values` and `kinds`."""

    table: pa.Table
    mapping: TableMapping
    code: Ints
    values: list[str]
    kinds: list[Kind]

    @classmethod
    def of(cls, table: pa.Table, mapping: TableMapping) -> Self:
        """Ask what each row is."""
        code, values = _encoded(table[mapping.kind])
        kinds = [mapping.kind_of(value) or _NOTHING for value in values]
        return cls(table=table, mapping=mapping, code=code, values=values, kinds=kinds)

    def notes(self) -> list[str]:
        """What the mapping does not know."""
        strange = [place for place, kind in enumerate(self.kinds) if kind is _NOTHING]
        if not strange:
            return []
        count = int(np.isin(self.code, strange).sum())
        names = ", ".join(sorted(repr(self.values[place]) for place in strange)[:8])
        return [
            f"{count} rows are neither compute nor communication: [table.kinds] does not name "
            f"{names}"
        ]

    def work(self, start: Ints, stop: Ints) -> Work:
        """The rows as device work."""
        name, texts = _encoded(self.table[self.mapping.name or self.mapping.kind])
        lane, lanes, stream = self._lanes()
        kinds = [KIND[WORK[kind.work] if kind.work else "kernel"] for kind in self.kinds]
        return Work(
            start=start,
            stop=stop,
            kind=np.array(kinds, np.int8)[self.code],
            name=name,
            texts=texts,
            lane=lane,
            lanes=lanes,
            stream=stream,
            offset=np.full(len(start), NULL, np.int64),
        )

    def _lanes(self) -> tuple[Ints, list[str], Ints]:
        """The lane of each row and the lanes: streams, else compute and the tags apart."""
        unknown = np.full(self.table.num_rows, NULL, np.int64)
        if self.mapping.stream is not None:
            column = self.table[self.mapping.stream]
            lane, lanes = _encoded(column.cast(pa.string()))
            if pa.types.is_integer(column.type):
                unknown = column.cast(pa.int64()).fill_null(NULL).to_numpy()
            return lane, lanes, unknown
        words = [kind.work or kind.tag or kind.op or "" for kind in self.kinds]
        lanes = sorted(set(words))
        return np.array([lanes.index(word) for word in words])[self.code], lanes, unknown

    def calls(self, rank: Rank) -> tuple[Calls, list[TagRule]]:
        """What each row communicates, and the rules that give its groups their tags."""
        groups: dict[Group, int] = {}
        of_kind = [groups.setdefault(group, len(groups)) if group else _NO_GROUP
                   for group in (_group(kind, rank) for kind in self.kinds)]  # fmt: skip
        group = np.array(of_kind, np.int64)[self.code]
        if self.mapping.group is not None:
            place, labels = _encoded(self.table[self.mapping.group])
            known = [
                groups.setdefault(Group(name=label, ranks=rank.groups.get(label)), len(groups))
                if label
                else _NO_GROUP
                for label in labels
            ]
            group = np.where(group == _NO_GROUP, np.array(known, np.int64)[place], group)
        op = [NULL if kind.op is None else OP[kind.op] for kind in self.kinds]
        calls = Calls(
            op=np.array(op, np.int64)[self.code],
            seq=np.full(len(self.code), NULL, np.int64),
            group=group,
            groups=tuple(groups),
            message=self._bytes(),
            name=self.code,
            named=tuple(
                Named(library="", op=kind.op or "OTHER", tag=kind.tag, fused=False)
                for kind in self.kinds
            ),
        )
        rules = {
            TagRule(field="name", value=tagged.name or "", tag=kind.tag)
            for kind in self.kinds
            if kind.tag is not None and (tagged := _group(kind, rank)) is not None
        }
        return calls, sorted(rules, key=lambda rule: str(rule.value))

    def _bytes(self) -> Ints:
        if self.mapping.bytes is None:
            return np.full(len(self.code), NULL, np.int64)
        column = self.table[self.mapping.bytes]
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64(), safe=False)
        numbers: Ints = column.cast(pa.int64()).fill_null(NULL).to_numpy()
        return np.where(numbers < 0, NULL, numbers)


def _encoded(column: Any) -> tuple[Ints, list[str]]:
    """Texts as places in a list of the different ones; a null is the empty text."""
    encoded = column.fill_null("").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _group(kind: Kind, rank: Rank) -> Group | None:
    """The group of a kind's rows, where the mapping says who is in it."""
    if not kind.same:
        return None
    label, ranks = rank.peers[kind.same]
    return Group(name=f"{kind.tag or kind.op} {label}", ranks=ranks)
