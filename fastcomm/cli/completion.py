"""``fastcomm completion``."""

import click

from fastcomm.cli.commands import OptionsCommand

_EXAMPLES = """\b
Examples:
  echo 'eval "$(fastcomm completion bash)"' >> ~/.bashrc
  echo 'eval "$(fastcomm completion zsh)"' >> ~/.zshrc
  fastcomm completion fish > ~/.config/fish/completions/fastcomm.fish
"""


@click.command("completion", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def run(shell: str) -> None:
    """Print the shell completion script for commands and options."""
    from click.shell_completion import get_completion_class

    from fastcomm.cli.main import main

    completion = get_completion_class(shell)
    if completion is not None:
        click.echo(completion(main, {}, "fastcomm", "_FASTCOMM_COMPLETE").source())
