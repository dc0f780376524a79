"""Warnings of many ranks as warnings of their run.

A rank counts its own events, whoever reads a report those of the run: texts that differ only in
such counts are one warning, with the counts summed.
"""

import re
from collections.abc import Iterable, Sequence

from fastcomm.trace.run import named_ranks

# Counts of one rank: "3 of 40 communication events", "12: their launch is not recorded".
_COUNT = re.compile(
    r"\b\d+(?= (?:of \d+ )?(?:(?:communication|device) events"
    r"|communication kernels|gloo: annotations|launches of CUDA graphs"
    r"|rows are neither|events that look like|calls of the device's runtime)\b)"
    r"|(?<= of )\d+(?= (?:communication|device) events\b)"
    r"|(?<=[:;] )\d+(?=: )|(?<=' \()\d+(?=\))"
)


def of_run(
    of_ranks: Iterable[tuple[int, Sequence[str]]], *, names_all: bool = False
) -> list[str]:
    """Return each warning once, with the ranks that it is about.

    Parameters
    ----------
    of_ranks
        The rank and its warnings.
    names_all
        Whether the ranks are named even where a warning is about all of them.

    Returns
    -------
    list of str
        In the order in which they first occur. Counts are sums over the ranks that are named;
        before a sum over all ranks stands "all 8 ranks together".

    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    counts: dict[tuple[str, ...], list[int]] = {}
    number = 0
    for number, (rank, texts) in enumerate(of_ranks, 1):  # noqa: B007 - the number of ranks
        for text in texts:
            parts, own = tuple(_COUNT.split(text)), [int(each) for each in _COUNT.findall(text)]
            ranks.setdefault(parts, []).append(rank)
            sums = counts.setdefault(parts, [0] * len(own))
            counts[parts] = [a + b for a, b in zip(sums, own, strict=True)]
    return [
        _subject(own, None if names_all else number, is_sum=bool(counts[parts]))
        + "".join(
            f"{part}{count}" for part, count in zip(parts, [*counts[parts], ""], strict=True)
        )
        for parts, own in ranks.items()
    ]


def _subject(ranks: Sequence[int], number: int | None, *, is_sum: bool) -> str:
    """Return the ranks that a warning is about: nothing for all of them without a count."""
    together = " together" if is_sum and len(ranks) > 1 else ""
    if len(ranks) != number:
        return f"{named_ranks(ranks)}{together}: "
    return f"all {number} ranks{together}: " if together else ""
