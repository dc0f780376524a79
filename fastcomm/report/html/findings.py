"""The three findings that matter: what they cost a step, the evidence, the next command.

Each candidate says how many nanoseconds of a step are at stake; the dearest three are shown.
"""

import shlex
from collections.abc import Sequence

import numpy as np

from fastcomm.metrics.result import Metrics
from fastcomm.report.html import words
from fastcomm.report.html.by_rank import ByRank
from fastcomm.report.html.page import Finding
from fastcomm.report.html.speed import NO_LINK
from fastcomm.trace.schema import TAGS

_MOST = 3
_LEVEL = 0.02  # of the median compute; ranks closer than that are equal


def findings(found: Metrics, ranks: ByRank, paths: Sequence[str]) -> tuple[Finding, ...]:
    """The findings of most weight; `paths` are those of the traces, for the commands."""
    where = " ".join(shlex.quote(path) for path in paths)
    candidates = [
        *_exposed(found, where),
        *_idle(found, where),
        *_suspects(found, ranks, where),
        *_untagged(found, where),
        *_unsized(found, where),
    ]
    return tuple(sorted(candidates, key=lambda each: -each.cost_ns)[:_MOST])


def _exposed(found: Metrics, where: str) -> list[Finding]:
    mean, made = found.iteration.mean_ns, []
    if mean is None:
        return []
    for tag in TAGS[:-1]:
        share = found.breakdown.exact[f"exposed_{tag}"]
        if not share or tag not in found.bandwidth:
            continue
        speed = found.bandwidth[tag]
        lacks = NO_LINK if found.link_bandwidth is None else "no event tells its size"
        made.append(
            Finding(
                title=(
                    f"{tag} communication that nothing hides takes ",
                    words.fact("exact.ns", share * mean, words.ns),
                    " of a step",
                ),
                evidence=(
                    words.fact(
                        f"exact.exposed_{tag}", share, words.percent, label="of the step"
                    ),
                    words.fact(
                        "overlap.by_tag",
                        found.overlap.by_tag.get(tag),
                        words.percent,
                        label="hidden behind compute",
                    ),
                    words.fact(
                        "bandwidth.avg_bus_util",
                        speed.avg_bus_util,
                        words.percent,
                        label="of the link in use",
                        why=lacks,
                    ),
                ),
                command=f"fastcomm what-if {where} --all-ranks --scale comm:{tag}=0.5",
                then=f"how much shorter the step is if {tag} communication takes half its time",
                cost_ns=share * mean,
            )
        )
    return made


def _idle(found: Metrics, where: str) -> list[Finding]:
    share, mean = found.breakdown.exact["idle"], found.iteration.mean_ns
    if not share or mean is None:
        return []
    evidence = [words.fact("exact.idle", share, words.percent, label="of the step")]
    windows = found.windows or ()
    if windows:
        widest = max(windows, key=lambda each: each.mean_ns)
        label = f"mean window from {widest.source} to {widest.target}"
        evidence.append(words.fact("windows.mean_ns", widest.mean_ns, words.ns, label=label))
    return [
        Finding(
            title=(
                "Nothing runs on the device for ",
                words.fact("exact.ns", share * mean, words.ns),
                " of a step",
            ),
            evidence=tuple(evidence),
            command=f"fastcomm critical-path {where} --all-ranks",
            then="whether the gaps are waits for the host, for other ranks, or the pipeline",
            cost_ns=share * mean,
        )
    ]


def _slow_rank(ranks: ByRank, where: str) -> list[Finding]:
    if not ranks.known or len(ranks.ranks) == 1:
        return []
    compute, at = ranks.ns["compute"], ranks.by_compute[-1]
    middle = float(np.median(compute))
    more = float(compute[at]) - middle
    if not middle or more / middle < _LEVEL:
        return []
    rank = int(ranks.ranks[at])
    return [
        Finding(
            title=(
                f"Rank {rank} computes ",
                words.fact("exact.compute", more, words.ns),
                " longer than the median rank in each step",
            ),
            evidence=(
                words.fact(
                    "iteration.above",
                    more / middle,
                    words.signed_percent,
                    label="compute beside the median",
                ),
                words.fact(
                    "exact.idle",
                    float(ranks.ns["idle"][at] / ranks.ns["time"][at]),
                    words.percent,
                    label=f"of its step is rank {rank} idle",
                ),
            ),
            command=f"fastcomm critical-path {where} --all-ranks",
            then="whether the others wait for it: how long it holds them up",
            cost_ns=more,
        )
    ]


_THEN = {
    "slow_gpu": "how long the others wait for it",
    "slow_link": "whether the link is on the path that sets the step",
    "jittery_host": "what the host does while the device waits",
    "imbalanced_stage": "which stage the path goes through",
    "hot_expert": "which chain of work the hot expert holds up",
}


def _suspects(found: Metrics, ranks: ByRank, where: str) -> list[Finding]:
    """What ranks beside their peers tell; without that, who computes the most."""
    table = found.tables.get("findings")
    if table is None:
        return _slow_rank(ranks, where)
    return [
        Finding(
            title=(row["words"],),
            evidence=(
                words.fact("findings.cost_ns", row["cost_ns"], words.ns, label="of a step"),
                words.fact(
                    "findings.cost_share", row["cost_share"], words.percent, label="of the step"
                ),
            ),
            command=_look(row["kind"], row["ranks"], where),
            then=_THEN.get(row["kind"], "what the step waits for"),
            cost_ns=row["cost_ns"],
        )
        for row in table.to_pylist()
    ]


def _look(kind: str, ranks: Sequence[int], where: str) -> str:
    whose = f"--rank {ranks[0]}" if kind == "jittery_host" and ranks else "--all-ranks"
    return f"fastcomm critical-path {where} {whose}"


def _untagged(found: Metrics, where: str) -> list[Finding]:
    share, mean = found.breakdown.exact["exposed_OTHER"], found.iteration.mean_ns
    if not share or mean is None:
        return []
    return [
        Finding(
            title=(
                "It is not known what ",
                words.fact("exact.ns", share * mean, words.ns),
                " of exposed communication is for",
            ),
            evidence=(
                words.fact("exact.exposed_OTHER", share, words.percent, label="of the step"),
            ),
            command=f"fastcomm info {where}",
            then="which process groups there are; then say the sizes: --tp, --pp, --dp, --ep",
            cost_ns=share * mean,
        )
    ]


def _unsized(found: Metrics, where: str) -> list[Finding]:
    events = sum(each.events for each in found.bandwidth.values())
    silent = sum(each.events_without_bytes for each in found.bandwidth.values())
    if not silent:
        return []
    return [
        Finding(
            title=(
                "The sizes of ",
                words.fact("bandwidth.events_without_bytes", silent, words.whole),
                f" of {words.many(events, 'communication event')} are unknown",
            ),
            evidence=(
                words.fact("bandwidth.avg_bw", None, words.rate, label="their bandwidth"),
            ),
            command=f"fastcomm info {where}",
            then="what the traces lack, and how to record it",
            cost_ns=0.0,
        )
    ]
