"""The kept events of one Kineto file as columns, and how one leads to another."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.schema import KIND
from fastcomm_kernels import attribution
from fastcomm_kernels.arrays import NULL, Ints

Rows = NDArray[np.int64]

# Calls of CUDA and HIP that always start device work; a copy or memset of nothing does not.
_LAUNCH = re.compile(r"Launch(?:Cooperative|Ext)?Kernel|GraphLaunch")


@dataclass(frozen=True, kw_only=True)
class Events:
    """All kept events of a file, sorted by start. NULL is unknown; row -1 is no event."""

    columns: dict[str, NDArray[Any]]
    details: dict[str, Ints]  # at -1, their end, is NULL
    texts: Sequence[str]
    lane: NDArray[np.int32]

    def rows(self, *kinds: str) -> Rows:
        """Rows of the events of these kinds."""
        wanted = np.zeros(len(KIND), np.bool_)
        wanted[[KIND[kind] for kind in kinds]] = True
        return np.flatnonzero(wanted[self.columns["kind"]])

    def rows_named(self, accept: Callable[[str], bool], *kinds: str) -> Rows:
        """Rows of the events of these kinds whose name is accepted."""
        rows = self.rows(*kinds)
        accepted = self.by_text(self.columns["name"][rows], lambda text: int(accept(text)))
        kept: Rows = rows[accepted == 1]
        return kept

    def by_text(self, codes: NDArray[Any], answer: Callable[[str], int]) -> Ints:
        """The answer to each text, asked once a text; NULL where there is no text."""
        codes = np.where(codes == NULL, len(self.texts), codes)
        met = np.zeros(len(self.texts) + 1, np.bool_)
        met[codes] = True
        asked = np.flatnonzero(met[:-1])
        answers = np.full(len(met), NULL, np.int64)
        answers[asked] = [answer(self.texts[code]) for code in asked.tolist()]
        found: Ints = answers[codes]
        return found

    def text(self, code: int) -> str | None:
        """The text of a code; None of NULL."""
        return None if code == NULL else self.texts[code]

    def names(self, rows: Rows) -> list[str]:
        """The names of some events."""
        return [self.texts[code] for code in self.columns["name"][rows].tolist()]

    def detail(self, name: str, rows: Rows) -> Ints:
        """A detail of some events; NULL where they have none."""
        found: Ints = self.details[name][self.places(rows)]
        return found

    def places(self, rows: Rows) -> NDArray[np.int32]:
        """Where the details of some events stand in the columns of `details`."""
        return np.where(rows >= 0, self.columns["detail"][rows], np.int32(-1))

    @cached_property
    def _launches(self) -> tuple[Ints, Rows]:
        """Correlations of the launching calls, sorted, and the calls' rows."""
        rows = self.rows("runtime")
        correlation = self.columns["correlation"][rows]
        order = np.argsort(correlation, kind="stable")
        return correlation[order], rows[order]

    def launch_of(self, rows: Rows) -> Rows:
        """The row of the call that launched each of these device events, or -1."""
        correlations, calls = self._launches
        wanted = self.columns["correlation"][rows]
        if not len(calls):
            return np.full(len(rows), -1, np.int64)
        at = np.minimum(np.searchsorted(correlations, wanted), len(calls) - 1)
        return np.where((correlations[at] == wanted) & (wanted != NULL), calls[at], -1)

    def unanswered(self) -> Ints:
        """Return when kernels or graphs were launched whose work is not among the events."""
        calls = self.rows_named(lambda name: _LAUNCH.search(name) is not None, "runtime")
        correlation = self.columns["correlation"]
        work = self.rows("kernel", "memcpy", "memset")
        is_absent = ~np.isin(correlation[calls], correlation[work])
        found: Ints = self.columns["start"][calls[is_absent]]
        return found

    def enclosing(self, ranges: Rows, launches: Rows) -> Rows:
        """The innermost of `ranges` around each launch on its thread, or -1."""
        start, stop = self.columns["start"], self.columns["stop"]
        found = np.full(len(launches), -1, np.int64)
        asked = np.flatnonzero(launches >= 0)
        if not len(ranges) or not len(asked):
            return found
        ranges = ranges[np.lexsort((-stop[ranges], start[ranges], self.lane[ranges]))]
        asked = asked[np.lexsort((start[launches[asked]], self.lane[launches[asked]]))]
        points = launches[asked]
        inner = attribution.enclosing(
            self.lane[ranges],
            start[ranges],
            stop[ranges],
            self.lane[points],
            start[points],
            stop[points],
        )
        found[asked] = np.where(inner >= 0, ranges[inner], -1)
        return found
