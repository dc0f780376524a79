"""Test that every suggested command works on its run."""

import re
import shlex
from dataclasses import replace

import pytest
from builders.commands import KINETO, quoted
from builders.html_page import parsed, without_scripts
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.findings.suggestions import Suggestions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

NSYS = ["mfu_2gpu.sqlite", "nccl_nvtx_4rank.sqlite"]


def run(words, *codes):
    """The standard output of a command that succeeds."""
    done = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code in (codes or (0,)), (words, done.output)
    return done.stdout


def suggested(folder, words):
    """The commands that the terminal, the page and `info` suggest for a run."""
    page = folder / "page.html"
    shown = run(["metrics", *words, "--html", page])
    shown += run(["info", *words])
    lines = re.findall(r"(?:^next:|, or|^   ) +(fastcomm .+?)(?=, or fastcomm|$)", shown, re.M)
    tree = parsed(without_scripts(page.read_text("utf-8")))
    codes = [each.children[0].text for each in tree.all("div", class_="command")]
    return [*lines, *codes]


def check(folder, words):
    """Run all suggested commands; returns how many there are."""
    commands = suggested(folder, words)
    assert f"fastcomm metrics {shlex.join(map(str, words))}" in commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "fastcomm"
        if arguments[:2] == ["metrics", str(words[0])] and len(arguments) == len(words) + 1:
            continue  # has been run
        if arguments[0] == "ingest":
            arguments[-1] = folder / "store"
        run(arguments)
    return len(commands)


@pytest.mark.parametrize("name", KINETO)
def test_every_command_suggested_for_a_kineto_trace_works(real, name, tmp_path):
    check(tmp_path, [real(name)])


@pytest.mark.parametrize("name", NSYS)
def test_every_command_suggested_for_an_nsys_export_works(nsys, name, tmp_path):
    check(tmp_path, [nsys / name])


def test_every_command_suggested_by_the_page_of_a_path_works(tmp_path):
    folder, page = tmp_path / "a run", tmp_path / "page.html"
    write(Job.of(steps=2, layers=2), folder)
    words = [folder, "--step", "11", "--ranks", "4-7"]
    for whose in ([], ["--rank", "6"]):
        run(["critical-path", *words, *whose, "--html", page])
        tree = parsed(without_scripts(page.read_text("utf-8")))
        commands = [each.children[0].text for each in tree.all("div", class_="command")]
        assert commands
        for command in commands:
            _, *arguments = shlex.split(command)
            assert {"--step", "11", "--ranks", "4-7", *whose} <= set(arguments)
            run(arguments)


@pytest.mark.parametrize(
    ("fault", "count"), [("slow_gpu", 3), ("jittery_host", 3), ("slow_link", 4)]
)
def test_every_command_suggested_for_a_fault_works_with_the_options_of_the_run(
    fault, count, tmp_path
):
    folder = tmp_path / "a run"
    write(Job.of(fault=fault, steps=2, layers=2), folder)
    assert check(tmp_path, [folder]) == count  # one more with exposed communication
    page = tmp_path / "page.html"
    run(["metrics", folder, "--ranks", "4-7", "--guess-tags", "--html", page])
    tree = parsed(without_scripts(page.read_text("utf-8")))
    for each in tree.all("div", class_="command"):
        _, *arguments = shlex.split(each.children[0].text)
        assert {"--ranks", "4-7", "--guess-tags"} <= set(arguments)
        run(arguments)


def test_a_run_with_a_skipped_rank_is_suggested_commands_that_skip_it_too(tmp_path):
    folder, page = tmp_path / "run", tmp_path / "page.html"
    paths = sorted(write(Job.of(steps=2, layers=2), folder))
    paths[2].write_bytes(b"no trace")
    run(["metrics", folder, "--keep-going", "--html", page], 3)
    tree = parsed(without_scripts(page.read_text("utf-8")))
    (command,) = [each.children[0].text for each in tree.all("div", class_="command")]
    assert command == f"fastcomm critical-path {quoted(folder)} --keep-going"
    run(shlex.split(command)[1:], 3)


def test_no_critical_path_is_suggested_where_compute_is_not_known(tmp_path):
    folder = tmp_path / "run"
    write(Job.of(steps=1, layers=1), folder)
    found = compute_metrics(open_run(folder))
    finding = found.findings[0]
    assert (
        Suggestions(metrics=found, arguments=["x"]).next(finding).line
        == "fastcomm critical-path x"
    )
    unknown = replace(found, missing={"compute": found.ranks})
    assert Suggestions(metrics=unknown, arguments=["x"]).next(finding) is None
