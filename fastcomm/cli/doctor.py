"""``fastcomm doctor``."""

import click

from fastcomm.cli.commands import OptionsCommand
from fastcomm.cli.results import json_option, print_json
from fastcomm.cli.shared_options import cluster_options
from fastcomm.errors import inert

_EXAMPLES = """\b
Examples:
  fastcomm doctor
  fastcomm doctor store/
  fastcomm doctor --dask tcp://scheduler:8786 --json
"""


@click.command("doctor", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("store", required=False, metavar="[STORE]")
@cluster_options
@json_option
@click.pass_context
def run(
    ctx: click.Context, /, store: str | None, dask: str | None, dask_wait: float, as_json: bool
) -> None:
    """Check the installation, a store, or a cluster, for a bug report.

    Prints versions, cores, memory, the kernel cache, whether a step with known numbers is
    measured correctly, and whether the cluster of --dask can be reached. All files of a STORE
    are compared with their recorded sizes and checksums. The output has no paths, user or host
    names, addresses or environment variables, so it can be shared. Exit codes: 0 no problem,
    1 a problem was found.
    """
    from fastcomm.analyses.doctor import examine
    from fastcomm.files import place
    from fastcomm.readers.detection import no_such_path

    if store is not None and not place(store).exists():
        raise no_such_path(store)
    diagnosis = examine(dask, wait_s=dask_wait, store=store)
    if as_json:
        print_json(diagnosis)
    else:
        marks = {"ok": " ", "note": "?", "bad": "!"}
        for check in diagnosis.checks:
            click.echo(f"{marks[check.state]} {check.name:<18} {inert(check.found)}")
    if diagnosis.is_bad:
        ctx.exit(1)
