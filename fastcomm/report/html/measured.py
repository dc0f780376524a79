"""The page of a run: what `fastcomm report` and `fastcomm metrics --html` write."""

from collections.abc import Sequence

from fastcomm.critical_path.ranks import Joined
from fastcomm.critical_path.result import CriticalPath
from fastcomm.metrics.headline import why_unknown
from fastcomm.metrics.result import Metrics
from fastcomm.report.commands import Suggestions
from fastcomm.report.html import (
    across,
    breakdown,
    overlap,
    path,
    ranks,
    speed,
    volume,
    windows,
    words,
)
from fastcomm.report.html.by_rank import ByRank
from fastcomm.report.html.findings import findings
from fastcomm.report.html.page import Page, Section, Table, columns, number, text
from fastcomm.report.html.words import Fact, plain
from fastcomm.report.rows import group_name
from fastcomm.trace.run import ranks_words, skipped_lines


def page(
    found: Metrics,
    paths: Sequence[str],
    *,
    options: Sequence[str] = (),
    critical: CriticalPath | None = None,
    joined: Joined | None = None,
    no_path: str = "",
    data: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of a run, with a critical path or the reason why there is none.

    `paths` and `options` are the words of the user that open the run; suggested commands
    repeat them.
    """
    by_rank = ByRank.of(found)
    why = why_unknown(found)
    sections = [
        breakdown.section(found, by_rank, why),
        overlap.section(found, why),
        speed.section(found),
        volume.section(found),
        windows.section(found, why),
        ranks.section(found, by_rank, why),
        across.section(found),
    ]
    if critical is not None:
        sections.append(path.section(critical, joined))
    sections.append(_evidence(found))
    return Page(
        title="Communication report",
        source=" ".join(paths),
        headline=(found.headline,),
        health=found.health or "",
        facts=(*_about(found, why), *breakdown.facts(found, why)),
        findings=findings(Suggestions(metrics=found, arguments=(*paths, *options))),
        sections=tuple(sections),
        warnings=(*_left_out(found), *found.warnings, *([no_path] if no_path else [])),
        data=tuple(data),
    )


def busiest(found: Metrics) -> int:
    """The rank that computes the most, and so keeps others waiting; the first if none tells."""
    by_rank = ByRank.of(found)
    return int(by_rank.ranks[by_rank.by_compute[-1]]) if by_rank.known else found.ranks[0]


def _about(found: Metrics, why: str) -> tuple[Fact, ...]:
    count = len(found.ranks)
    return (
        words.fact("ranks", count, words.whole, label=_of_ranks(count, found.expected_ranks)),
        words.fact("iterations", found.iterations, words.whole, label="iterations", why=why),
    )


def _of_ranks(count: int, expected: int) -> str:
    """The word behind the number of ranks."""
    return ranks_words(count, expected).removeprefix(str(count)).strip()


def _left_out(found: Metrics) -> list[str]:
    """A line for each rank that could not be read and is in no number here."""
    return [f"skipped: {plain((line,))}" for line in skipped_lines(found.failed)]


def _evidence(found: Metrics) -> Section:
    rows = []
    for row in found.tables["group_tags"].to_pylist():
        fits = f" ({row['candidates']})" if row["candidates"] else ""
        rows.append(
            (
                text(group_name(row["description"], row["size"])),
                number(row["size"], words.whole, "the trace does not say who is in the group"),
                text(row["tag"]),
                text(f"{row['tag_source']}{fits}"),
                number(row["on_ranks"], words.whole),
                number(row["events"], words.whole),
            )
        )
    heads = columns("process group", ("ranks each", "groups.size"))
    table = Table(
        name="groups-table",
        caption="Process groups, and where their tags come from",
        columns=(
            *heads,
            *columns("tag"),
            *columns("by"),
            *columns("", ("on ranks", "groups.on_ranks"), ("events", "groups.events"))[1:],
        ),
        rows=tuple(rows),
    )
    how = ", ".join(found.found_by) or "no rule"
    return Section(
        name="evidence",
        title="What do these numbers rest on?",
        lead=(
            f"Iterations were found by {how}, and are cut by the {found.iteration_clock}'s "
            f"clock; bytes are {found.bytes} bytes. The tags of "
            "communication come from these process groups.",
        ),
        blocks=(table,) if rows else (),
    )
