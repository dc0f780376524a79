"""Test options of all commands: one meaning, one group, and help that fits a screen."""

import subprocess
import sys
from collections import defaultdict
from textwrap import wrap

import click
import pytest
from click.testing import CliRunner

from docs import pages
from fastcomm.cli import main
from fastcomm.cli.commands import Option, group_title, meaning

COMMANDS = pages.commands()
LINES, WIDTH = 60, 80
# The first column of an option, and the space around it.
TEXT_WIDTH = WIDTH - 1 - 30
METAVARS = {"N", "FACTOR", "TIME", "RATE", "LIST", "FILE", "DIR", "PATH", "NAME", "METHOD"}
METAVARS |= {"TEXT", "REGEX", "TAG", "ADDRESS", "SECONDS", "BYTES", "ORDER", "OTHER", "MODEL"}
METAVARS |= {"I[:J]", "NAME|FILE", "NAME=LIST", "WHAT=FACTOR", "WHAT=TIME", "CONDITION"}


def options():
    """Every option of every command, with the command's name."""
    for name, command in COMMANDS.items():
        for each in command.params:
            if isinstance(each, click.Option):
                yield name, each


def shown(*words):
    """The help that a command prints on a terminal of 80 columns."""
    result = CliRunner().invoke(main, words, prog_name="fastcomm", terminal_width=WIDTH)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_page_of_options_is_current():
    assert pages.OPTIONS_PAGE.read_text("utf-8") == pages.options_page(), "run `make pages`"


def test_an_option_has_one_meaning_and_one_group_in_all_commands():
    said = defaultdict(set)
    for name, each in options():
        assert isinstance(each, Option), f"{name} {each.opts}: made by click.option"
        said[max(each.opts, key=len)].add((meaning(each), group_title(each)))
    assert {name: texts for name, texts in said.items() if len(texts) > 1} == {}


def test_a_short_option_stands_for_one_long_one():
    long_names = defaultdict(set)
    for _, each in options():
        for short in each.opts:
            if not short.startswith("--"):
                long_names[short].add(max(each.opts, key=len))
    assert {short: names for short, names in long_names.items() if len(names) > 1} == {}


def test_the_help_of_an_option_has_at_most_two_lines():
    for name, each in options():
        context = click.Context(COMMANDS[name], info_name=name)
        record = click.Option.get_help_record(each, context)
        assert len(wrap(record[1], TEXT_WIDTH)) <= 2, (name, record)


def test_values_have_plain_names_and_no_ranges():
    for name, each in options():
        context = click.Context(COMMANDS[name], info_name=name)
        names, text = click.Option.get_help_record(each, context)
        assert "<x" not in text
        assert "x>" not in text
        if not each.is_flag and not isinstance(each.type, click.Choice):
            assert each.make_metavar(context) in METAVARS, (name, names)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_screen(name):
    lines = shown(*name.split(), "--help")
    assert len(lines) <= LINES
    whole = shown(*name.split(), "--help-all")
    end = whole.index("Examples:") if "Examples:" in whole else len(whole)
    assert all(len(line) <= WIDTH for line in whole[:end])
    if len(whole) > len(lines):
        assert lines[-1].startswith(f"fastcomm {name} --help-all shows ")
    count = sum(line.startswith("  -") for line in lines)
    assert count <= 16


@pytest.mark.parametrize("name", ["dispatch", "dpro"])
def test_the_help_of_a_group_fits_a_screen(name):
    assert len(shown(name, "--help")) <= LINES


def test_the_main_help_loads_no_command_and_no_cloup():
    code = "import sys; from fastcomm.cli import main; main(['--help'], standalone_mode=False);"
    code += "print({'cloup', 'numpy', 'pyarrow', 'fastcomm.cli.commands'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
