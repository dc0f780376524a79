"""Test the exit codes of commands: 2 for a wrong command line, 1 for a wrong input."""

import gzip

import pytest
from builders.shared_data import needs, path_of
from click.testing import CliRunner

from fastcomm.cli.main import main

COMMANDS = [
    "info", "metrics", "report", "kernels", "critical-path", "what-if --scale comm=0.5",
    "stragglers", "dpro stats", "dpro replay", "ingest -o store", "convert",
    "doctor",
]  # fmt: skip


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_does_not_exist_is_wrong_usage(command):
    more = ["new.json"] if command == "convert" else []
    done = call(*command.split(), "nowhere", *more)
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: nowhere: no such file or directory\n")


def test_a_side_of_a_comparison_that_does_not_exist_is_wrong_usage():
    done = call("compare", "nowhere", "elsewhere")
    assert done.exit_code == 2
    assert "BEFORE (nowhere): nowhere: no such file or directory" in done.stderr


def test_a_file_as_the_destination_of_chakra_traces_is_wrong_usage(tmp_path):
    call("demo", tmp_path / "run", "--num-ranks", 1)
    file = tmp_path / "all.json"
    file.write_text("{}")
    done = call("convert", tmp_path / "run", file, "--to", "chakra")
    assert done.exit_code == 2
    assert f"{file}: a file, and --to chakra writes a directory" in done.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [("metrics", "--iteration-regex"), ("critical-path", "--data-load-events")],
)
def test_an_invalid_regular_expression_is_wrong_usage(tmp_path, command, option):
    done = call(command, tmp_path, option, "(")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {option}: invalid regular expression '(': ")


def test_an_overlay_of_a_store_names_the_input_that_it_needs(tmp_path):
    call("demo", tmp_path / "run", "--num-ranks", 1)
    call("ingest", tmp_path / "run", "-o", tmp_path / "store")
    done = call("critical-path", tmp_path / "store", "--overlay", tmp_path / "new.json")
    assert done.exit_code == 2
    assert "--overlay draws into a copy of a JSON trace, and this is none" in done.stderr


@needs("nsys")
@pytest.mark.parametrize("form", ["uniform", "chakra"])
def test_a_run_without_operations_is_not_converted(tmp_path, form):
    export = tmp_path / "host.sqlite"
    packed = path_of("nsys/nccl_nvtx_4rank.sqlite.gz")
    export.write_bytes(gzip.decompress(packed.read_bytes()))
    done = call("convert", export, tmp_path / "new", "--to", form)
    assert done.exit_code == 1
    assert "`fastcomm info` says what is missing" in done.stderr
    assert not list(tmp_path.glob("new*/*.et"))
    assert not (tmp_path / "new").is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("metrics x --rank 0", "No such option '--rank'. Did you mean '--ranks'?"),
        ("metrics x --step 1", "No such option '--step'. Did you mean '--steps'?"),
        ("critical-path x --steps 1", "No such option '--steps'. Did you mean '--step'?"),
        ("isp --pp 2", "No such option '--pp'. Did you mean '--pp-sizes'?"),
        ("kernels x --unheard-of", "No such option '--unheard-of'.\n"),
        ("-v", "No such option '-v' before a command; there are --version, "),
        ("-v", "Others follow the command, as in `fastcomm COMMAND -v`."),
        ("version", "No such command 'version'. Did you mean '--version'?"),
        ("dispatch generate --law popularity -o x", "needs --popularity FILE, a text file"),
        ("dispatch compare --law popularity", "`fastcomm dispatch generate --law popularity"),
        (
            "isp --model 7B --world-size 8 --seq-len 4Ki --global-batch 1Mi-4Mi",
            "for a range: --global-batch-min 1Mi --global-batch-max 4Mi",
        ),
    ],
)
def test_a_wrong_command_line_says_what_to_write_instead(line, message):
    done = CliRunner().invoke(main, line.split(), prog_name="fastcomm")
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_uniform_trace_is_not_written_to_a_directory(tmp_path):
    done = call("convert", tmp_path, tmp_path)
    assert done.exit_code == 2
    call("demo", tmp_path / "run", "--num-ranks", 1)
    done = call("convert", tmp_path / "run", tmp_path)
    assert f"name a file, as in {tmp_path / 'run.json.gz'}" in done.stderr


def test_a_wrong_file_of_edits_lists_the_keys(tmp_path):
    call("demo", tmp_path / "run", "--num-ranks", 1)
    (tmp_path / "edits.toml").write_text("speed = 2")
    done = call("what-if", tmp_path / "run", "--edits", tmp_path / "edits.toml")
    assert "edits.toml: unknown option 'speed'; " in done.stderr
    done = call("what-if", tmp_path / "run", "--overlap", "xp")
    assert "there is no 'comm' here" in done.stderr
