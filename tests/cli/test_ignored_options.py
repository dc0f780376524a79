"""Test that options without effect on an input are errors or warnings in all commands."""

import shlex

import pytest
from builders.commands import quoted
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.errors import ConfigError

COMMANDS = [
    "info {run}", "metrics {run}", "kernels {run}", "what-if {run}", "critical-path {run}",
    "critical-path {run} --rank 0", "critical-path {run} --compat hta --annotation Step",
    "what-if {run} --scale comm=0.5", "convert {run} {new}.json",
    "ingest {run} --output {new}",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for form in ("kineto", "table", "nsys"):
        assert (
            call(f"demo {quoted(folder / form)} --num-ranks 2 --format {form}").exit_code == 0
        )
    run, store = quoted(folder / "kineto"), quoted(folder / "store")
    assert call(f"ingest {run} --output {store}").exit_code == 0
    return folder


def call(line):
    return CliRunner().invoke(main, shlex.split(line))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_warns_of_layout_options_that_change_nothing(inputs, tmp_path, line):
    line = line.format(run=quoted(inputs / "kineto"), new=quoted(tmp_path / "new"))
    done = call(f"{line} --order deepspeed --tp 2 --guess-tags")
    assert done.exit_code == 0, done.output
    for name in ("--order deepspeed", "--tp 2", "--guess-tags"):
        assert done.output.count(f"warning: {name} changed nothing: ") == 1


IGNORED = [
    ("store", "--allow-truncated", "a store is complete; the option is for fastcomm ingest"),
    ("nsys", "--allow-truncated", "a truncated export is not readable"),
    ("table", "--allow-truncated", "a truncated table is not readable"),
    ("table", "--iteration-regex x", "a column states the step"),
]


@pytest.mark.parametrize(("form", "option", "reason"), IGNORED)
def test_an_option_that_the_format_ignores_is_an_error(inputs, form, option, reason):
    for command in ("info", "metrics", "kernels"):
        done = call(f"{command} {quoted(inputs / form)} {option}")
        assert done.exit_code == 2
        assert f"{option.split()[0]} has no effect: " in done.stderr
        assert reason in done.stderr


def test_the_step_boundary_of_a_table_is_an_error(inputs):
    done = call(f"metrics {quoted(inputs / 'table')} --step-boundary host --allow-truncated")
    assert done.exit_code == 2
    assert "--step-boundary has no effect: " in done.stderr
    assert "--allow-truncated has no effect: " in done.stderr


def test_a_setting_that_the_format_ignores_is_a_warning(inputs, tmp_path, monkeypatch):
    settings = tmp_path / "settings.toml"
    settings.write_text("[info]\nallow-truncated = true\n")
    monkeypatch.setenv("FASTCOMM_SETTINGS", str(settings))
    done = call(f"info {quoted(inputs / 'store')}")
    assert done.exit_code == 0
    assert "warning: --allow-truncated changed nothing: a store is complete" in done.output


def test_an_option_that_one_of_two_runs_ignores_is_a_warning(inputs):
    for words in ("compare {store} {kineto}", "compare {store} {kineto} --no-kernels"):
        line = words.format(store=quoted(inputs / "store"), kineto=quoted(inputs / "kineto"))
        done = call(f"{line} --allow-truncated")
        assert done.exit_code == 0, done.output
        assert done.stderr.count("--allow-truncated changed nothing: a store is compl") == 1


def test_functions_refuse_options_that_the_format_ignores(inputs):
    with pytest.raises(ConfigError, match=r"allow_truncated has no effect: a store"):
        fastcomm.open(inputs / "store", allow_truncated=True)


def test_options_of_trials_are_no_options_of_runs(inputs):
    run = quoted(inputs / "kineto")
    for words in ("--compat dpro", "--repeat 2", "--tensors 1"):
        done = call(f"what-if {run} {words}")
        assert done.exit_code == 2
        assert f"No such option '{words.split()[0]}'" in done.stderr
    for of_trials, command in (("stats", "kernels"), ("replay", "what-if")):
        done = call(f"dpro {of_trials} {run}")
        assert f"For traces of a profiler: fastcomm {command} {run}\n" in done.stderr
