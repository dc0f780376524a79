"""Which device work is communication, by its name, and what is known of it in every format."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.events import Events, Ints, Rows
from fastcomm.readers.partners import Partners
from fastcomm.readers.patterns import PATTERNS, PEER_COPIES, Named, Pattern, namer
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.tags import CHANGED_NOTHING, Group
from fastcomm_kernels.json_numbers import NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Communication events, one entry each, sorted by start; NULL is unknown."""

    row: Rows  # of the event
    op: NDArray[np.int8]
    seq: Ints
    group: NDArray[np.int32]  # index into `groups`, -1 where nothing is known
    groups: tuple[Group, ...]
    sizes: byte_rules.Sizes
    named: tuple[Named, ...]  # what names say
    name: Ints  # index into `named`
    partners: Partners | None = None  # where the trace says who they are
    # Why sizes are unknown, and what would help; None where that was reported before.
    unsized: tuple[str, ...] | None = ()


def communication(
    events: Events, patterns: Sequence[Pattern]
) -> tuple[Rows, Ints, tuple[Named, ...]]:
    """Rows of the communication, and what the name says of each."""
    found: list[Named] = []

    def asking(table: tuple[Pattern, ...]) -> Callable[[str], int]:
        said_by = namer(table)

        def ask(name: str) -> int:
            if (said := said_by(name)) is None:
                return -1
            found.append(said)
            return len(found) - 1

        return ask

    rows, answers = [], []
    for kind, table in (("kernel", (*patterns, *PATTERNS)), ("memcpy", PEER_COPIES)):
        asked = events.rows(kind)
        answer = events.by_text(events.columns["name"][asked], asking(table))
        said = answer >= 0
        rows.append(asked[said])
        answers.append(answer[said])
    merged = np.concatenate(rows)
    order = np.argsort(merged)
    return merged[order], np.concatenate(answers)[order], tuple(found)


def unmatched(events: Events, patterns: Sequence[Pattern]) -> Iterator[str]:
    """Say of each of a user's patterns that decides for no kernel, why."""
    if not patterns:
        return
    codes = np.unique(events.columns["name"][events.rows("kernel")])
    names = [events.texts[code] for code in codes.tolist() if code != NULL]
    deciding, matching = set(), set()
    for name in names:
        fitting = [n for n, each in enumerate(patterns) if re.search(each.regex, name)]
        deciding.update(fitting[:1])
        matching.update(fitting)
    for n, pattern in enumerate(patterns):
        if n not in deciding:
            why = "an earlier pattern decides for the same kernels; put it first"
            if n not in matching:
                why = "no kernel has such a name" if names else "there are no kernels"
            yield f"[[kernels]] pattern = {pattern.regex!r}{CHANGED_NOTHING}{why}"
