"""``fastcomm hang``."""

from pathlib import Path

import click

from fastcomm.cli.commands import OptionsCommand, option_of
from fastcomm.cli.main import INCOMPLETE
from fastcomm.cli.messages import warn
from fastcomm.cli.results import html_option, json_option, print_json
from fastcomm.options import ReadOptions

HUNG = 5  # exit code
_EXAMPLES = """\b
Examples:
  fastcomm hang dumps/
  fastcomm hang dumps/ --html hang.html
  fastcomm hang dumps/ --json | jq .culprits
  fastcomm hang /tmp/comm_lib_trace_rank_*
"""


@click.command("hang", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@option_of(ReadOptions, "keep_going")
@json_option
@html_option()
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    keep_going: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Find why a job hangs: which ranks hold it up, in what, and who waits.

    PATH is a directory with the flight-recorder dumps of the ranks, one file a rank, or the
    files. Stacks of Python, logs, and what NCCL RAS prints, are read beside them. No dump is
    executed. Exit codes: 0 nothing hangs, 5 a hang was found, 1 no dump or a damaged one, 3
    nothing hangs in the dumps that could be read.
    """
    from fastcomm.hang.analysis import diagnose_hang
    from fastcomm.hang.tables import show

    hang = diagnose_hang(paths, keep_going=keep_going)
    warn((*hang.failed, *hang.warnings))
    if html is not None:
        from fastcomm.hang.page import page
        from fastcomm.show.pages import write

        write(page(hang, " ".join(paths)), html)
    if as_json:
        print_json(hang)
    else:
        show(hang)
    if hang.hang:
        ctx.exit(HUNG)
    if hang.failed:
        ctx.exit(INCOMPLETE)
