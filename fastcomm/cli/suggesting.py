"""A group of commands that suggests the nearest command to one that does not exist."""

import shlex
from difflib import get_close_matches
from pathlib import Path

import click


class SuggestingGroup(click.Group):
    """A group that names the command that was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments; a usage error names the nearest one."""
        name = args[0]
        is_option = name.startswith("-") or ctx.resilient_parsing
        if not is_option and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{self._suggestion(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        known = self.list_commands(ctx)
        near = [each for each in known if each.startswith(name.lower())]
        near = near or get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {near[0]!r}?"
        if "metrics" in known and Path(name).exists():
            return f" To measure {name}: {ctx.command_path} metrics {shlex.quote(name)}"
        return ""
