"""``fastcomm doctor``."""

import click

from fastcomm.cli.options import SECONDS
from fastcomm.cli.results import print_json

_EXAMPLES = """\b
Examples:
  fastcomm doctor
  fastcomm doctor store/
  fastcomm doctor --dask tcp://scheduler:8786 --json
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("store", required=False, metavar="[STORE]")
@click.option(
    "--dask",
    metavar="ADDRESS",
    help="Look at a Dask cluster, too: tcp://host:8786, file:scheduler.json or local:4.",
)
@click.option(
    "--dask-wait",
    type=SECONDS,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the scheduler.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    store: str | None,
    dask: str | None,
    dask_wait: float,
    as_json: bool,
) -> None:
    """Say what fastcomm runs on and whether it works, for a report of a bug.

    Printed are versions, cores, memory, the cache of compiled code, whether a step of known
    numbers is measured right, and whether a cluster can be reached. All files of a STORE are
    read, and compared with the sizes and checksums of when they were written. There are no
    paths, names of users or hosts, addresses or environment in it: it can be pasted as it is.
    Exit codes: 0 all is well, 1 something has to be mended.
    """
    from fastcomm.analyses.doctor import examine

    found = examine(dask, wait_s=dask_wait, store=store)
    if as_json:
        print_json(found)
    else:
        marks = {"ok": " ", "note": "?", "bad": "!"}
        for each in found.checks:
            click.echo(f"{marks[each.state]} {each.name:<18} {each.found}")
    if found.is_bad:
        ctx.exit(1)
