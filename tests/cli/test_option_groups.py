"""Test options of all commands: one meaning, one group, and help that fits a screen."""

import inspect
import re
import subprocess
import sys
from collections import defaultdict
from textwrap import wrap

import click
import pytest
from builders.commands import invoke, words_of
from builders.hang_files import write_dumps
from click.testing import CliRunner

from docs import pages
from fastcomm.cli.commands import Option, group_title, meaning
from fastcomm.cli.main import main

COMMANDS = pages.commands()
LINES, WIDTH = 60, 80
# The first column of an option, and the space around it.
TEXT_WIDTH = WIDTH - 1 - 30
METAVARS = {"N", "FACTOR", "TIME", "RATE", "LIST", "FILE", "DIR", "PATH", "NAME", "METHOD"}
METAVARS |= {"TEXT", "REGEX", "TAG", "ADDRESS", "SECONDS", "BYTES", "ORDER", "OTHER", "MODEL"}
METAVARS |= {
    "I[:J]",
    "KEY",
    "NAME|FILE",
    "NAME=LIST",
    "WHAT=FACTOR",
    "WHAT=VALUE",
    "WHAT",
    "CONDITION",
}


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


# Options whose type differs by command, and why.
OWN_TYPE = {
    "--calibrate": "isp takes a path, dispatch evaluate fits to its table",
    "--compat": "each command reproduces its own tool",
    "--format": "demo writes formats of traces, kernels formats of tables",
    "--seq-len": "isp takes several lengths, and units as in 64Ki",
    "--world-size": "isp takes several numbers, and ranges",
    "--global-batch": "isp says how to search a range",
    "--output": "ingest passes the directory on to the workers as text",
}


def described_type(option, command):
    """The type of an option's values: class, choices, range, flag, and name in the help."""
    kind = option.type
    ends = getattr(kind, "min", None), getattr(kind, "max", None)
    name = option.make_metavar(click.Context(COMMANDS[command]))
    choices = tuple(getattr(kind, "choices", ()))
    return type(kind).__name__, choices, ends, option.is_flag, option.multiple, name


def test_an_option_has_one_type_and_one_set_of_choices_in_all_commands():
    types = defaultdict(set)
    for name, each in options():
        types[max(each.opts, key=len)].add(described_type(each, name))
    assert {name for name, kinds in types.items() if len(kinds) > 1} == set(OWN_TYPE)


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


def test_the_help_of_every_command_has_an_example():
    for name in COMMANDS:
        text = "\n".join(shown(*name.split(), "--help"))
        assert f"  fastcomm {name.split()[0]}" in text.partition("Example")[2], name


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
def test_the_help_of_a_group_fits_a_screen_and_cuts_no_summary(name):
    lines = shown(name, "--help")
    assert len(lines) <= LINES
    assert not any(line.endswith("...") for line in lines[1:])


def test_every_group_shows_all_options():
    assert shown("--help-all") == shown("--help")
    for name in ("dispatch", "dpro"):
        lines = shown(name, "--help-all")
        for inner in main.get_command(None, name).commands:
            own = shown(name, inner, "--help-all")
            at = lines.index(own[0])
            assert lines[at : at + len(own)] == own


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_fit_the_screen(name):
    assert all(len(line) <= WIDTH for line in shown(*name.split(), "--help"))


def partners():
    """Each option with a partner that its command has, too: "--overlay", "--compat hta"."""
    for name, each in options():
        own = {word: other for other in COMMANDS[name].params for word in other.opts}
        for partner in (*each.needs, *each.not_with):
            word, _, value = partner.partition(" ")
            if word in own:
                yield name, each, partner, own[word], value


def test_partners_are_options_with_such_values():
    assert len(list(partners())) > 50
    for name, each, partner, other, value in partners():
        choices = getattr(other.type, "choices", [value])
        assert not value or value in choices, (name, each.name, partner)


def test_a_help_text_names_the_one_partner():
    for _, each, partner, _, _ in partners():
        if (partner,) == each.needs and each.name != "workers":
            assert partner.partition(" ")[0] in each.help
            assert partner.partition(" ")[2] in each.help


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("metrics . --dask-wait 9 --xlsx", ["--dask-wait needs --dask.", "needs --output."]),
        ("metrics . --full --json", ["--full has no effect with --json; leave one out."]),
        ("metrics . --wide --json", ["--wide has no effect with --json; leave one out."]),
        ("metrics . -q -v", ["--verbose has no effect with --quiet; leave one out."]),
        ("critical-path . --exact", ["--exact needs --annotation."]),
        ("critical-path . --instance 0", ["--instance needs --annotation."]),
        (
            "what-if . --annotation= --exact --instance 1",
            [
                '--instance has no effect with --annotation "";',
                '--exact has no effect with --annotation "";',
            ],
        ),
        ("info . --workers 2", ["--workers needs --all."]),
        (
            "critical-path . --all-edges --all-events --zero-weight-launches",
            ["--all-edges needs --overlay.", "--all-events", "needs --compat hta."],
        ),
        (
            "critical-path . --workers 2 --dask tcp://x:1",
            ["--workers has no effect with --dask; leave one out."],
        ),
        ("kernels . --format csv --json", ["--format has no effect with --json;"]),
        (
            "isp --strict-batch --overlap-wdp",
            ["--strict-batch needs --compat.", "--overlap-wdp"],
        ),
        (
            "isp --compat isp-2025 --ep-sizes 2",
            ["--ep-sizes has no effect with --compat; leave one out."],
        ),
        ("isp --explain 1 --trainer-args megatron", ["--explain has no effect with"]),
        ("dispatch generate -o x --popularity {file}", ["needs --law popularity."]),
        ("dispatch generate -o x --compat seed --hot-ranks 0:2", ["with --compat seed;"]),
        (
            "dispatch generate -o x --compat seed --law gate --distinct resample",
            ["--law has no effect with --compat seed;", "--distinct has no effect with --law"],
        ),
        (
            "dispatch simulate . --schedules deepep --decomposition assignment --incast 1",
            ["--decomposition needs --schedules fast.", "--incast needs --schedules direct."],
        ),
        ("demo x --format table --link-bandwidth 3GB/s", ["no effect with --format table;"]),
        ("doctor --dask-wait 3", ["--dask-wait needs --dask."]),
        (
            "kernels . --rank 0 --rank=1 --step 1 --step 1 --json --json",
            ["--rank is given 2 times; give it once.", "--step is given 2 times;"],
        ),
        (
            "isp --gpus 8 --world-size 16",
            ["--world-size (or --gpus) is given 2 times; give it once."],
        ),
        ("isp --flash --no-flash", ["--flash is given 2 times; give it once."]),
        ("kernels . --full-names --by category", ["--full-names has no effect with --by cat"]),
        ("kernels . --wide --format csv", ["--wide has no effect with --format csv;"]),
    ],
)
def test_options_without_effect_are_wrong_usage_and_all_named(line, messages):
    done = CliRunner().invoke(main, words_of(line, file=__file__))
    assert done.exit_code == 2
    assert all(message in done.stderr for message in messages), done.stderr


def test_a_default_that_is_spelled_out_needs_no_partner():
    done = CliRunner().invoke(main, ["info", "nowhere", "--workers", "1", "--dask-wait", "60"])
    assert "nowhere: no such file" in done.stderr


def test_a_setting_without_effect_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "settings.toml").write_text("[info]\ndask-wait = 9\nworkers = 2\n")
    monkeypatch.setenv("FASTCOMM_SETTINGS", str(tmp_path / "settings.toml"))
    assert "nowhere: no such file" in CliRunner().invoke(main, ["info", "nowhere"]).stderr


def test_a_wrong_command_line_and_a_wrong_input_have_their_exit_codes(tmp_path):
    (tmp_path / "rank0.json").write_text("no trace")
    for code, words in ((2, ["--ranks", "x"]), (2, ["--tp", "0"]), (1, [])):
        done = CliRunner().invoke(main, ["metrics", str(tmp_path), *words])
        assert done.exit_code == code, done.stderr


def test_the_main_help_loads_no_command_and_no_cloup():
    code = "import sys; from fastcomm.cli.main import main\n"
    code += "main(['--help'], standalone_mode=False);"
    code += "print({'cloup', 'numpy', 'pyarrow', 'fastcomm.cli.commands'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_commands_that_print_tables_have_the_option_that_tables_name():
    printing = {
        name
        for name, command in COMMANDS.items()
        if command.callback is not None
        and re.search(
            r"import .*\btables\b|\.tables import", inspect.getsource(command.callback)
        )
    }
    having = {name for name, option in options() if "--wide" in option.opts}
    assert {"hang", "metrics"} <= printing <= having


def test_a_hint_of_a_narrow_table_names_an_option_of_the_command(tmp_path, monkeypatch):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    monkeypatch.setenv("COLUMNS", "40")
    assert "(--wide shows them)" in " ".join(invoke("hang", folder, code=5).stdout.split())
    wide = invoke("hang", folder, "--wide", code=5).stdout
    assert "not shown" not in wide
    assert "and wait for" in wide
