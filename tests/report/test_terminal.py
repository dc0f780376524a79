"""Test that printed text fits the terminal, without cutting numbers."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from builders.commands import invoke, quoted, words_of
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.comparison.command import Condition
from fastcomm.errors import Lines
from fastcomm.metrics import page as by_rank_page
from fastcomm.metrics import tables
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.links import Link
from fastcomm.show import pages
from fastcomm.show.console import percent, plain_console, say, shortened, table
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

WIDTHS = (60, 80, 200)
# What prints, by name; {run}, {healthy}, {table} and {workload} are made by the demo.
COMMANDS = {
    "info": "info {run} --all",
    "metrics": "metrics {run} --link-bandwidth 400Gbit/s",
    "metrics in full": "metrics {run} --full --spec --link-bandwidth 400Gbit/s",
    "compare": "compare {healthy} {run} --fail-if iteration.mean_ns>+900%",
    "critical-path": "critical-path {run} --rank 3",
    "critical-path of all ranks": "critical-path {run}",
    "critical-path by HTA's rules": "critical-path {run} --compat hta",
    "what-if": "what-if {run} --scale comm:TP=0.5:1:0.25 --overlap DP",
    "bottlenecks": "what-if {run} --bottleneck",
    "stragglers": "stragglers {table}",
    "isp": "isp --model 7B --world-size 8 --seq-len 8Ki --global-batch 4Mi --sensitivity",
    "isp explained": "isp --model 7B --world-size 8 --seq-len 8Ki --global-batch 4Mi "
    "--explain 1",
    "isp sweep": "isp --model 7B --world-size 8,16 --seq-len 4Ki,8Ki --global-batch 4Mi",
    "isp calibrated": "isp --model 7B --world-size 8 --seq-len 8Ki --global-batch 4Mi "
    "--calibrate {run}",
    "dispatch compare": "dispatch compare {workload}",
    "dispatch simulate": "dispatch simulate {workload} --schedules deepep,fast,deepep-compat",
    "dispatch place": "dispatch place {workload}",
    "dispatch sweep": "dispatch sweep --over num_nodes=2,4 --over zipf_alpha=1.1,2",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the commands read, by name."""
    folder = tmp_path_factory.mktemp("made")
    small = {"steps": 2, "layers": 2, "micro_batches": 2}
    write(Job.of(4, **small), folder / "run")
    write(Job.of(4, **small, straggler=None), folder / "healthy")
    invoke("demo", folder / "table", "--num-ranks", 8, "--format", "table")
    shape = ("--num-nodes", 2, "--iter-num", 2, "--seed", 0)
    invoke("dispatch", "generate", *shape, "-o", folder / "workload")
    found = {name: folder / name for name in ("run", "healthy", "workload")}
    return {**found, "table": next((folder / "table").glob("*.parquet"))}


def printed(command, made, width, *more):
    done = CliRunner().invoke(
        main,
        [*words_of(command, **made), *more],
        env={"COLUMNS": width},
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def numbers(text):
    """The words of a text that have a digit and are no part of a shortened name."""
    return {
        word for word in text.split() if re.search(r"\d", word) and not re.search("[…/]", word)
    }


def test_a_narrower_pipe_than_40_cells_has_lines_of_40(made):
    assert printed("metrics {run}", made, "10") == printed("metrics {run}", made, "40")


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit_the_terminal_without_cutting_numbers(name, made):
    command = COMMANDS[name]
    wide = printed(command, made, "80", "--wide")
    for width in WIDTHS:
        text = printed(command, made, str(width))
        for line in text.splitlines():
            is_command = line.startswith("    fastcomm ")
            assert len(line) <= width or is_command, f"{width}: {len(line)}: {line!r}"
            for word in line.split():
                assert not re.fullmatch(r"[-+]?[\d.,]*…[\d.,%x]*", word), line
        assert numbers(text) <= numbers(wide), f"{width}: {numbers(text) - numbers(wide)}"


@pytest.mark.parametrize("ranks", [1, 4, pytest.param(64, marks=pytest.mark.soak)])
def test_metrics_are_one_screen_for_a_run_of_any_size(ranks, tmp_path):
    write(Job.of(ranks, steps=2), tmp_path)
    run = {"run": tmp_path}
    text = printed("metrics {run}", run, "80")
    lines = text.splitlines()
    # Three of them are on exposed communication in a deep pipeline, one is on idle time.
    assert len(lines) <= 34
    assert lines[0].startswith(f"{ranks} rank")
    assert "formula" not in text.replace("specification's formulas", "")
    assert "util" not in text
    for name in ("compute", "exposed communication", "copies", "idle"):
        assert any(line.startswith(name) for line in lines)
    assert sum(line.startswith("rank ") for line in lines) <= 4
    whole = json.loads(printed("metrics {run} --json", run, "80"))
    assert {"breakdown", "bandwidth", "windows", "waits"} <= set(whole)
    assert whole["breakdown"]["spec"]


def test_full_and_spec_print_further_tables(made):
    full, spec = (printed("metrics {run}", made, "200", each) for each in ("--full", "--spec"))
    for heading in ("windows between phases", "process groups", "size from", "own waits/step"):
        assert heading in full
        assert heading not in spec
    for heading in ("specification formula", "utilization by payload"):
        assert heading in spec
        assert heading not in full


def test_the_links_that_cost_the_most_are_listed_first():
    costs = [3, 9, 1, 7, 5, 2, 8, 4, 6]
    rates = {"bus_bw": 1e9, "peers_bus_bw": 2e9, "ratio": 0.5}
    kind = {"group": None, "tag": "DP", "op": "AllReduce", "size_from": 1, "count": 1}
    links = [
        Link(ranks=(ms, 10), excess_ns=1e6 * ms, is_slow=True, **kind, **rates) for ms in costs
    ]
    links.insert(4, replace(links[0], excess_ns=20e6, is_slow=False))
    rows = tables.slow_links(SimpleNamespace(links=links)).rows
    assert [ranks for _, ranks, *_ in rows] == [f"{ms}, 10" for ms in range(9, 1, -1)]
    assert [lost for *_, lost in rows] == [f"+{ms}.00 ms" for ms in range(9, 1, -1)]


def test_a_skipped_rank_and_warnings_come_before_the_tables(tmp_path):
    files = write(Job.of(4, steps=1), tmp_path)
    files[2].write_bytes(b"")
    done = invoke("metrics", tmp_path, "--keep-going", code=3)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("skipped: rank 2:")
    warned = [place for place, line in enumerate(lines) if line.startswith("warning")]
    assert max(warned, default=0) < lines.index("")


def test_a_long_warning_takes_a_few_lines_unless_it_has_a_command():
    from fastcomm.metrics import tables

    text = "nobody knows why this is so. " * 30
    brief = tables._brief(text, 200)
    assert len(brief) <= 200
    assert brief.endswith("so. ... (--full)")
    with_command = Lines(text + "\n    fastcomm doctor\n(or nothing)")
    assert tables._brief(with_command, 200) == with_command
    # In a name, a line that looks like a command is none.
    assert len(tables._brief(str.__str__(with_command), 200)) <= 200
    assert tables._brief("short", 200) == "short"


def test_info_breaks_the_lines_of_a_warning(tmp_path, monkeypatch):
    from fastcomm.info import info

    monkeypatch.setattr(info, "warnings_of_ranks", lambda *_, **__: [Lines("one\ntwo")])
    write(Job.of(1, steps=1), tmp_path)
    text = invoke("info", tmp_path).stdout
    assert "warning: one\ntwo\n" in text
    assert "\\n" not in text


NAME = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>)"
)


def test_a_name_is_shortened_in_the_middle():
    assert shortened("short", 5) == "short"
    assert shortened(NAME, 120).endswith("3ul> >(…)")
    assert shortened(NAME, 60).startswith("void at::native::vectorized_elementwise_kernel<4, ")
    assert shortened(NAME, 40) == "void at::native::vec…ntwise_kernel<…>(…)"
    assert shortened("x" * 30, 11) == "xxxxx…xxxxx"
    assert shortened("漢字" * 10, 9) == "漢字…漢字"


@given(st.text("ab<>()漢 ", max_size=60), st.integers(2, 40))
def test_a_shortened_name_fits(name, width):
    from rich.cells import cell_len

    assert cell_len(shortened(name, width)) <= width


CELLS = st.sampled_from(["1.23 ms", "n/a", "100.0 %", "12345678", "-4.5 GB/s", ""])
ROWS = st.integers(1, 9).flatmap(
    lambda count: st.lists(
        st.tuples(st.text("abc_<> ", max_size=90), *[CELLS] * count), min_size=1, max_size=4
    )
)


@given(ROWS, st.integers(40, 120), st.data())
def test_a_table_of_any_width_shows_complete_columns(rows, width, data):
    words = ("share", "exposed/step", "payload/step/GPU", "wait caused/step", "p95")
    headings = [data.draw(st.sampled_from(words)) for _ in rows[0][1:]]
    shown = table("name of the kernel", *headings, drop=("p95",))
    for row in rows:
        shown.add_row(*row)
    console = plain_console()
    console.file = io.StringIO()
    console.width = width
    console.print(shown)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    for line in lines:
        for word in line.split():
            if re.search(r"\d", word) and not word.startswith(("p95", "(")):
                assert any(word in cell.split() for row in rows for cell in row[1:]), line


def test_sentences_break_at_words_and_commands_do_not():
    console = plain_console()
    console.file = io.StringIO()
    console.width = 40
    command = "    fastcomm metrics " + "x" * 50
    say(console, "word " * 20, indent=2, hanging=4)
    say(console, command, indent=2, hanging=4)
    lines = console.file.getvalue().splitlines()
    assert lines[-1] == command
    assert lines[0].startswith("  word")
    assert all(line.startswith("    word") and len(line) <= 40 for line in lines[1:-1])


def test_a_number_and_its_percent_sign_are_on_one_line():
    for width in range(40, 60):
        console = plain_console()
        console.file = io.StringIO()
        console.width = width
        say(console, "[bold]It takes 4.8 % of the step,[/] then 12.5 % of the rest. " * 4)
        lines = console.file.getvalue().splitlines()
        assert not any(line.startswith("%") for line in lines)
        assert " ".join(lines).count(" %") == 8
        assert max(map(len, lines)) <= width


def test_a_share_that_rounds_to_nothing_has_no_sign():
    assert [percent(x) for x in (-0.0001, -0.01, None)] == ["0.0 %", "-1.0 %", "n/a"]


@pytest.mark.parametrize(
    ("condition", "suggested"),
    [
        ("iteration.mean_ns > 3%", "'iteration.mean_ns > +3%'"),
        ("bandwidth.DP.avg_bus_bw < 5%", "'bandwidth.DP.avg_bus_bw < -5%'"),
    ],
)
def test_a_percentage_of_other_metrics_needs_a_sign(condition, suggested, made):
    done = invoke("compare", made["run"], made["run"], "--fail-if", condition, code=2)
    assert suggested in done.stderr


def test_a_percentage_of_a_share_is_a_value():
    for name in ("breakdown.exact.idle", "overlap.by_tag.DP", "bandwidth.DP.avg_util"):
        assert Condition.parsed(f"{name} > 20%").of == "value"


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["metric", "x"], "'metrics'"),
        (["critical_path"], "'critical-path'"),
        (["dispatch", "compar"], "'compare'"),
        (["crit"], "'critical-path'"),
        (["con"], "'convert'"),
    ],
)
def test_a_mistyped_command_suggests_the_nearest(words, suggested):
    assert f"Did you mean {suggested}?" in invoke(*words, code=2).stderr


def test_a_path_in_place_of_a_command_suggests_metrics(tmp_path):
    assert f"metrics {quoted(tmp_path)}" in invoke(tmp_path, code=2).stderr
    assert "Did you mean" not in invoke("zzzzzz", code=2).stderr


def test_a_sequence_length_of_8k_warns_that_it_is_8000():
    words = ("isp", "--model", "7B", "--world-size", 64, "--global-batch", 4_000_000)
    warned = invoke(*words, "--seq-len", "8k").stderr
    assert "--seq-len 8k is 8000 tokens; 8Ki is 8192" in warned
    assert "8Ki" not in invoke(*words, "--seq-len", "8000").stderr


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        (["--seq-len", "8kb"], ["--seq-len 8kb is 8000 tokens; 8Ki is 8192"]),
        (["--seq-len", "8.5k,8Ki"], ["--seq-len 8.5k is 8500 tokens; 8.5Ki is 8704"]),
        (["--seq-len", "8000"], []),
        (
            ["--seq-len", "8Ki", "--global-batch-min", "4m", "--global-batch-max", "8 M"],
            [
                "--global-batch-min 4m is 4000000 tokens; 4Mi is 4194304",
                "--global-batch-max 8 M is 8000000 tokens; 8Mi is 8388608",
            ],
        ),
    ],
)
def test_every_count_of_tokens_in_decimal_units_is_warned_of(words, warnings):
    if "--global-batch-min" not in words:
        words = [*words, "--global-batch", "4M"]
        warnings = [*warnings, "--global-batch 4M is 4000000 tokens; 4Mi is 4194304"]
    done = CliRunner().invoke(main, ["isp", "--model", "7B", "--world-size", "1", *words])
    found = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert found == [f"warning: {each}" for each in warnings]


def test_errors_and_warnings_fit_a_terminal_and_are_one_line_elsewhere(tmp_path):
    command = [sys.executable, "-m", "fastcomm", "isp", "--model", str(tmp_path / "absent")]
    command += ["--world-size", "8", "--seq-len", "4Ki", "--global-batch", "4Mi"]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 2
    assert len(plain.stderr.splitlines()) == 1
    for width in (60, 100):
        assert len(plain.stderr) > width
        lines = on_terminal(command, width)
        assert lines[0].startswith("Error: ")
        assert all(line.startswith("  ") for line in lines[1:])
        assert all(len(line) <= width or " " not in line.strip() for line in lines)
        assert " ".join(" ".join(lines).split()) == plain.stderr.strip()


def on_terminal(command, width):
    """The lines that a command writes to stderr where that is a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=slave, check=False)
    os.close(slave)
    lines = os.read(master, 1 << 16).decode().splitlines()
    os.close(master)
    return lines


def test_dispatch_states_what_its_times_sum_over(made):
    text = " ".join(printed("dispatch compare {workload}", made, "200").split())
    assert "sums over 2 iterations of 1 layer each" in text
    one = printed("dispatch compare --num-nodes 2 --iter-num 1", made, "200")
    assert "sums" not in one


def test_dispatch_prints_decimal_units_with_a_note_on_the_original(made):
    words = "dispatch simulate {workload} --schedules fast,fast-compat"
    found = json.loads(printed(words, made, "80", "--json"))
    text = printed(words, made, "80")
    own = re.search(r"([\d.]+) (\w+) between nodes, algorithm", text).groups()
    original = re.search(r"Total Inter-node Traffic *: ([\d.]+) (\w+)", text).groups()
    for strategy, (number, unit) in (("fast", own), ("fast-compat", original)):
        size = found["strategies"][strategy]["inter_node_bytes"]
        units = {"MB": 1e6, "GB": 1e9} if strategy == "fast" else {"GB": 2**30}
        assert float(number) == pytest.approx(size / units[unit], rel=5e-3)
    assert text.count("are GiB and GiB/s, 2^30 bytes") == 1


def test_differences_within_noise_are_not_reported(made):
    text = printed("metrics {healthy}", made, "80")
    assert "above the mean" not in text
    assert "slowest rank" not in text
    compute = np.array([100.0, 100.1, 100.2])
    ranks = RankMeans(ranks=np.arange(3), ns={"compute": compute})
    lead = pages.plain(by_rank_page._ranks_lead(None, ranks, ""))
    assert lead.startswith("All 3 ranks compute equally long")
    ranks = RankMeans(ranks=np.arange(3), ns={"compute": compute * [1, 1, 1.2]})
    lead = pages.plain(by_rank_page._ranks_lead(None, ranks, ""))
    assert lead.startswith("Rank 2 computes the most")


def test_ranks_that_cause_little_waiting_are_not_listed(made):
    whole = json.loads(printed("metrics {healthy} --json", made, "80"))
    caused = {}
    for row in whole["waits"]:
        caused[row["rank"]] = caused.get(row["rank"], 0) + row["wait_caused_ns"]
    worth = [ns for ns in caused.values() if ns >= 0.005 * whole["iteration"]["mean_ns"]]
    text = printed("metrics {healthy}", made, "80")
    listed = [line for line in text.splitlines() if re.match(r"rank \d", line)]
    assert len(listed) == min(3, len(worth))
