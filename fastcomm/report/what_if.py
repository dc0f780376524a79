"""A what-if for a person, as JSON, and as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from fastcomm.critical_path.device_time import notes
from fastcomm.critical_path.what_if import Sweep, WhatIf
from fastcomm.report import files, json_text
from fastcomm.report.console import plain_console, say
from fastcomm.report.critical_path import WORDS
from fastcomm.report.rows import Table, table
from fastcomm.units import format_ns, percent

_STEP_DIGITS = 4


def document(found: WhatIf, sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """What `fastcomm what-if --json` prints."""
    return {
        "rank": found.before.about.rank,
        "edits": [str(edit) for edit in found.edits],
        "before_ns": found.before_ns,
        "after_ns": found.after_ns,
        "speedup": found.speedup,
        "replay_error_ns": found.replay_error_ns,
        "summary_ns": {
            "before": found.before.summary_ns(),
            "after": found.after.summary_ns(),
        },
        "path": {
            "before": {"event_ids": found.before.event_ids},
            "after": {"event_ids": found.after.event_ids},
        },
        "sweeps": [
            {
                "edit": f"{each.edit.action} {each.edit.what}",
                "values": list(each.values),
                "span_ns": list(each.span_ns),
            }
            for each in sweeps
        ],
        "notes": list(notes(found.before)),
    }


def show(found: WhatIf, sweeps: Sequence[Sweep], console: Console | None = None) -> None:
    """Print the answer to stdout; plain text where that is no terminal."""
    console = plain_console(console)
    faster = f", {found.speedup:.3f} times as fast" if found.speedup is not None else ""
    before, after = (format_ns(ns, _STEP_DIGITS) for ns in (found.before_ns, found.after_ns))
    say(console, f"[bold]{before} before, {after} after[/]{faster}")
    for edit in found.edits:
        say(console, escape(str(edit)), indent=2)
    error = format_ns(found.replay_error_ns)
    say(console, f"The replay without edits is off by {error} at most.", indent=2)
    console.print(_classes(found))
    for each in sweeps:
        console.print(_sweep(each, found.before_ns))
    for note in notes(found.before):
        say(console, f"note: {escape(note)}", hanging=2, style="dim")


def _classes(found: WhatIf) -> Table:
    shown = table("time on the path", "before", "after")
    before, after = found.before.summary_ns(), found.after.summary_ns()
    for name in sorted(before | after, key=lambda name: -before.get(name, 0)):
        shown.add_row(
            WORDS.get(name, name), format_ns(before.get(name, 0)), format_ns(after.get(name, 0))
        )
    return shown


def _sweep(each: Sweep, before_ns: int) -> Table:
    shown = table(f"{each.edit.action} {each.edit.what}", "step", "of today")
    for value, span in zip(each.values, each.span_ns, strict=True):
        share = span / before_ns if before_ns else 1.0
        shown.add_row(f"{value:g}", format_ns(span), percent(share))
    return shown


def write(
    found: WhatIf, sweeps: Sequence[Sweep], folder: str | Path, *, xlsx: bool = False
) -> list[Path]:
    """Write what_if.json, the new path, and the sweeps; their paths."""
    tables = {"path_after": found.after.breakdown}
    if sweeps:
        tables["sweep"] = pa.concat_tables([each.to_arrow() for each in sweeps])
    text = json_text.dumps(document(found, sweeps))
    book = "what_if" if xlsx else None
    return files.write_tables(folder, {"what_if.json": text}, tables, book)
