"""``fastcomm mcp`` and ``fastcomm skill``."""

from importlib.util import find_spec
from pathlib import Path

import click

from fastcomm.cli.commands import OptionsCommand, option
from fastcomm.cli.parameter_types import OutputFolder
from fastcomm.cli.run_options import workers_option
from fastcomm.errors import FastcommError
from fastcomm.option_fields import OUTPUT

_EXAMPLES = """\b
Examples:
  fastcomm mcp runs/
  fastcomm mcp runs/ baselines/ --out pages/ --workers 8
  claude mcp add fastcomm -- fastcomm mcp runs/
"""
_SKILL_EXAMPLES = """\b
Examples:
  fastcomm skill > SKILL.md
"""


@click.command("mcp", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="DIR...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@option(
    "--out",
    type=OutputFolder(),
    group=OUTPUT,
    is_common=True,
    help="Directory for pages. Default: none, and the server writes nothing.",
)
@workers_option()
def mcp(*, folders: tuple[Path, ...], out: Path | None, workers: int) -> None:
    """Serve runs to agents, by the Model Context Protocol on stdin and stdout.

    The tools describe, measure and compare the runs below the directories, and read nothing
    outside of them. A link that leads outside is refused. Nothing is written but pages, and
    only with --out. There is no shell. An MCP client starts this command by itself; each
    client has a server of its own. Needs the extra mcp.
    """
    if find_spec("mcp") is None:
        raise FastcommError("fastcomm mcp needs the MCP SDK: pip install 'fastcomm[mcp]'")
    from fastcomm.agents.folders import Folders
    from fastcomm.agents.server import ServerSettings, serve

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        out = out.resolve()
    serve(ServerSettings(folders=Folders.of(folders).roots, out=out, workers=workers))


@click.command("skill", cls=OptionsCommand, epilog=_SKILL_EXAMPLES)
def skill() -> None:
    """Print a skill file that teaches an agent how to find what slows a job down.

    It names the question to ask first, what not to conclude, and how to prove a claim.
    """
    from fastcomm.agents.guide import skill as text

    click.echo(text(), nl=False)
