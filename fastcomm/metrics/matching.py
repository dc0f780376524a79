"""How much of the communication was matched across ranks, by what, and why not the rest."""

from dataclasses import dataclass

import pyarrow as pa

from fastcomm.exchange.ungrouped import LEAST
from fastcomm.metrics.compared import Compared, MatchCounts
from fastcomm.metrics.ungrouped import Doubt, Ungrouped
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

BY_NUMBER = "group and sequence number"
BY_ORDER = "group and order"
BY_PARTNER = "named partners"
BY_ENDS = "order and ends of operations, no group metadata"

_MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """How much of the communication was matched across ranks."""

    events: int  # of known groups of several ranks, with known partners; and those by ends
    matched: int
    share: float | None
    by: dict[str, int]  # events matched, by rule
    collectives: int  # that several ranks were matched in
    messages: int  # of which both sides were found
    dropped: int  # of a group whose events could not be brought in line
    unsaid: int  # SendRecv that do not say their one partner, or their group
    ungrouped: int  # collectives on a rank, of no known group, that were not matched
    ends_agree_ns: float | None  # of the ungrouped that were matched: the ends farthest apart
    note: str | None  # what a reader has to know of collectives of no known group


def matching(compared: Compared, sums: pa.Table) -> Matching:
    """Sum up how ranks were matched; `sums` is `bandwidth.sums_by_rank`."""
    matched, alone = compared.matched, compared.ungrouped
    return Matching(
        events=matched.events,
        matched=matched.joined,
        share=matched.joined / matched.events if matched.events else None,
        by=_by(matched),
        collectives=matched.collectives,
        messages=matched.messages,
        dropped=matched.dropped,
        unsaid=int(sums["messages"].to_numpy().sum()) - matched.sides,
        ungrouped=alone.events - alone.matched,
        ends_agree_ns=alone.agree_ns if alone.matched else None,
        note=note(alone),
    )


def _by(matched: MatchCounts) -> dict[str, int]:
    return {
        BY_NUMBER: matched.by_number,
        BY_ORDER: matched.by_order,
        BY_PARTNER: matched.by_partner,
        BY_ENDS: matched.by_ends,
    }


def note(found: Ungrouped) -> str | None:
    """Say how collectives of no known group were matched, or why not; None without any."""
    if not (found.matched or found.doubts or found.missing):
        return None
    if not found.matched:
        return (
            f"{found.events} collective events name no process group and were not matched "
            f"across ranks: {_reasons(found)}. Waiting and order of arrival are n/a for them."
        )
    how = (
        f"by their order on each stream and by their ends, which agree within "
        f"{format_ns(found.agree_ns)} on aligned clocks"
    )
    if found.matched == found.events:
        return f"No process group is named: collectives were matched across all ranks {how}."
    rest = f": {_reasons(found)}" if found.doubts else ""
    return (
        f"{found.matched} of {found.events} collective events that name no process group were "
        f"matched across all ranks {how}. The others were not{rest}."
    )


def _reasons(found: Ungrouped) -> str:
    """Why collectives were not matched, of the first streams."""
    reasons = [_reason(each, found.reference) for each in found.doubts[:_MOST_DOUBTS]]
    if more := len(found.doubts) - len(reasons):
        reasons.append(f"likewise {more} more streams")
    if found.missing:
        what = "rank of the job is" if found.missing == 1 else "ranks of the job are"
        reasons.append(
            f"{found.missing} {what} missing, and those at hand may share no collective"
        )
    return "; ".join(reasons)


def _reason(doubt: Doubt, reference: int | None) -> str:
    stream = "" if doubt.stream == NULL else f" on stream {doubt.stream}"
    pair = f"ranks {reference} and {doubt.rank}"
    return {
        "smaller groups": "other collectives are of groups of fewer ranks",
        "messages": "there are messages between ranks, so not all ranks do the same",
        "absent": f"rank {doubt.rank} has none{stream}",
        "few": f"there are fewer than {LEAST}{stream}",
        "order": f"{pair} differ in operations, sizes or their order{stream}",
        "ends": f"their ends{stream} do not agree between {pair}",
        "impossible": f"some{stream} end on one rank before they begin on another",
        "loose": f"their ends{stream} differ nearly as much as their starts",
        "separate": f"ranks{stream} fall into groups that end separately",
    }[doubt.why]
