"""``fastcomm info`` and ``fastcomm doctor``."""

import click

from fastcomm.cli.commands import OptionsCommand, option
from fastcomm.cli.results import exit_if_skipped, json_option, print_json
from fastcomm.cli.run_options import ExecutionOptions, cluster_options, opened_run, run_options
from fastcomm.errors import inert
from fastcomm.option_fields import READING
from fastcomm.options import ReadOptions

_DOCTOR_EXAMPLES = """\b
Examples:
  fastcomm doctor
  fastcomm doctor store/
  fastcomm doctor --dask tcp://scheduler:8786 --json
"""
_EXAMPLES = """\b
Examples:
  fastcomm info traces/
  fastcomm info traces/ --all --workers 8
  fastcomm info store/ --json | jq .groups
"""


@click.command("doctor", cls=OptionsCommand, epilog=_DOCTOR_EXAMPLES)
@click.argument("store", required=False, metavar="[STORE]")
@cluster_options
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, /, store: str | None, dask: str | None, dask_wait: float, as_json: bool
) -> None:
    """Check the installation, a store, or a cluster, for a bug report.

    Prints versions, cores, memory, the kernel cache, whether a step with known numbers is
    measured correctly, and whether the cluster of --dask can be reached. All files of a STORE
    are compared with their recorded sizes and checksums. The output has no paths, user or host
    names, addresses or environment variables, so it can be shared. Exit codes: 0 no problem,
    1 a problem was found.
    """
    from fastcomm.files import place
    from fastcomm.formats.detection import no_such_path
    from fastcomm.info.doctor import examine

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


@click.command("info", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@option(
    "--all",
    "all_ranks",
    is_flag=True,
    group=READING,
    is_common=True,
    help="Read every rank. Default: the first rank alone.",
)
@run_options
@json_option
def run(
    *,
    paths: tuple[str, ...],
    all_ranks: bool,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Describe a run: format, ranks, steps, process groups, and missing data.

    PATH is as for fastcomm metrics. Reads the first rank alone, which takes seconds for a run
    of any size; of a store of fastcomm ingest, all ranks are known at once.
    """
    from fastcomm.info.info import info

    with opened_run(paths, reading, execution) as opened:
        details = info(opened, all_ranks=all_ranks, anew=not reading.is_plain)
    if as_json:
        print_json(details)
    else:
        from fastcomm.info.tables import show

        show(details, paths)
    exit_if_skipped(details.skipped)
