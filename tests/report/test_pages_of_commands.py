"""Test the pages that commands write."""

import pytest
from builders import replay_data
from builders.exchanges import EXCHANGES
from builders.html_page import (
    assert_sound,
    charts,
    parsed,
    without_scripts,
)
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import FastcommError
from fastcomm.show.pages import Page
from fastcomm.show.pages import write as write_page
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

DRAWN = ["--num-nodes", "2", "--seq-len", "512", "--iter-num", "1"]
EXPERTS = ["--model", "deepseek-v3", "--ep", "16", "--tokens-per-gpu", "64"]
PLANNED = ["--model", "llama3-8b", "--gpus", "16", "--cluster", "h100", "--global-batch", "32"]
ASKED = ["--model", "7B", "--global-batch", "4Mi"]
COMMANDS = {
    "metrics": ["metrics", "RUN", "--link-bandwidth", "50GB/s"],
    "critical-path": ["critical-path", "RUN", "--rank", "3"],
    "critical-path of all ranks": ["critical-path", "RUN"],
    "what-if": ["what-if", "RUN", "--scale", "comm:TP=0.5", "--scale", "comm:DP=0.5:1:0.25"],
    "kernels": ["kernels", "RUN"],
    "kernels of streams": ["kernels", "RUN", "--by", "stream", "--rank", "3"],
    "compare": ["compare", "RUN", "RUN"],
    "isp": ["isp", *ASKED, "--world-size", "16", "--seq-len", "8Ki"],
    "plan": ["plan", *PLANNED],
    "isp sweep": ["isp", *ASKED, "--world-size", "16,32", "--seq-len", "4Ki,64Ki"],
    "dispatch compare": ["dispatch", "compare", *DRAWN],
    "dispatch compare of a model": ["dispatch", "compare", *EXPERTS],
    "dispatch sweep": ["dispatch", "sweep", *DRAWN[2:], "--over", "num_nodes=2,4"],
}
RECORDED = {
    "dpro stats": ["dpro", "stats", str(replay_data.TRIAL)],
    "dpro replay": ["dpro", "replay", str(replay_data.TRIAL), "--bottleneck"],
    "stragglers": ["stragglers", str(replay_data.TABLE)],
}
CHARTS = {
    "metrics": "breakdown",
    "critical-path": "path-strip",
    "critical-path of all ranks": "path-strip",
    "what-if": "sweep-0",
    "kernels": "ranks-chart",
    "kernels of streams": "kernels-chart",
    "compare": "parts-chart",
    "dpro stats": "operations-chart",
    "isp": "front-chart",
    "plan": "layouts-chart",
    "isp sweep": "sweep-chart",
    "dispatch compare": "loads-chart",
    "dispatch compare of a model": "kernels-chart",
    "dispatch sweep": "sweep-chart",
    "dpro replay": "replay-heat",
    "stragglers": "workers-chart",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=4, steps=2, layers=2, micro_batches=2), made)
    return made


def page_of(words, path):
    """The page that a command writes; it prints as well."""
    said = CliRunner().invoke(main, [*words, "--html", str(path)])
    assert said.exit_code == 0, said.output
    assert said.stdout
    return parsed(without_scripts(path.read_text("utf-8")))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_writes_a_valid_page(name, folder, tmp_path):
    words_ = [str(folder) if word == "RUN" else word for word in COMMANDS[name]]
    tree = page_of(words_, tmp_path / "page.html")
    assert_sound(tree)
    assert CHARTS[name] in charts(tree)


@replay_data.needed
@pytest.mark.parametrize("name", RECORDED)
def test_commands_write_valid_pages_of_recorded_data(name, tmp_path):
    tree = page_of(RECORDED[name], tmp_path / "page.html")
    assert_sound(tree)
    assert CHARTS[name] in charts(tree)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (EXCHANGES, []),
        (EXCHANGES, ["--calibrate"]),
        ("mode,nodes,ranks,hidden,topk,tokens\nnormal,1,8,7168,8,4096\n", []),
    ],
)
def test_an_evaluation_has_a_page(tmp_path, text, options):
    table = tmp_path / "exchanges.csv"
    table.write_text(text)
    tree = page_of(["dispatch", "evaluate", str(table), *options], tmp_path / "page.html")
    assert_sound(tree)
    assert ("errors-chart" in charts(tree)) == ("dispatch_us" in text)


def test_a_placement_has_a_page(tmp_path):
    drawn = [*DRAWN, "-o", str(tmp_path / "work")]
    assert CliRunner().invoke(main, ["dispatch", "generate", *drawn]).exit_code == 0
    tree = page_of(["dispatch", "place", str(tmp_path / "work")], tmp_path / "page.html")
    assert_sound(tree)
    assert "placing-table" in {each.attrs["id"] for each in tree.all(id=...)}


def test_a_directory_as_page_is_an_error(tmp_path):
    said = CliRunner().invoke(main, ["metrics", "x", "--html", str(tmp_path)])
    assert said.exit_code == 2
    with pytest.raises(FastcommError, match="is a directory"):
        write_page(Page(title="", source="", headline=(), facts=(), sections=()), tmp_path)


def test_a_search_without_a_strategy_that_fits_has_a_page(tmp_path):
    target = tmp_path / "page.html"
    words = ["plan", *PLANNED, "--memory", "1GiB", "--html", str(target)]
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 1
    tree = parsed(without_scripts(target.read_text("utf-8")))
    assert_sound(tree)
    assert "no strategy fits into memory" in next(tree.all("h1")).text
