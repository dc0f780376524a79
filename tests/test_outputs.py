"""Test that outputs replace only regular files."""

import os
import shutil
import stat
from itertools import cycle
from pathlib import Path

import pytest
from builders.commands import words_of
from builders.fault_tools import refused, run
from builders.replay_data import TRIAL
from builders.writers import NEEDS_TRIAL, WRITERS, write_inputs

from fastcomm.errors import FastcommError
from fastcomm.files import aside, check_no_input, guarded, note_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


MORE = [
    "metrics {inputs}/rank0.json --html {out}/page.html",
    "report {inputs}/rank0.json --html {out}/report.html --no-data",
    "convert {inputs}/rank0.json {out}/chakra --to chakra",
    "demo {out}/demo --num-ranks 1 --format table",
    "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --html {out}/page.html",
]
COMMANDS = [*(words for words, _ in WRITERS), *MORE]
if TRIAL.is_dir():
    COMMANDS += [words for words, _ in NEEDS_TRIAL]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_anything_but_regular_files(inputs, tmp_path, command):
    out = tmp_path / "out"
    out.mkdir()
    run(*words_of(command, inputs=inputs, out=out, trial=TRIAL))
    names = [each.relative_to(out) for each in out.rglob("*") if each.is_file()]
    assert names
    precious = tmp_path / "precious"
    precious.write_text("precious")
    cases = zip([*names, names[0]], cycle(("link", "fifo")))
    for place, (name, how) in enumerate(cases):
        other = tmp_path / str(place)
        path = other / name
        path.parent.mkdir(parents=True)
        path.symlink_to(precious) if how == "link" else os.mkfifo(path)
        said = refused(*words_of(command, inputs=inputs, out=other, trial=TRIAL))
        assert len(said.splitlines()) == 1
        assert path.is_symlink() if how == "link" else stat.S_ISFIFO(path.lstat().st_mode)
        assert precious.read_text() == "precious"
        assert not list(other.rglob("*unfinished*"))


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if "{" in each.split("{out}")[0]]
)
def test_no_command_overwrites_its_input(inputs, tmp_path, command):
    if "demo" in command or "generate" in command or "isp" in command:
        pytest.skip("reads no file")
    out, mine, trial = tmp_path / "out", tmp_path / "inputs", tmp_path / "trial"
    shutil.copytree(inputs, mine)
    if "{trial}" in command:
        shutil.copytree(TRIAL, trial)
    out.mkdir()

    def words(out):
        return words_of(command, inputs=mine, out=out, trial=trial)

    assert run(*words(out))[0] == 0
    names = [each.relative_to(out) for each in out.rglob("*") if each.is_file()]
    named = [word for word in command.split() if word.startswith("{inputs}/")]
    read = mine / named[0].partition("/")[2] if named else next(trial.rglob("trace.json.gz"))
    content = read.read_bytes()
    for place, name in enumerate(names):
        path = tmp_path / str(place) / name
        path.parent.mkdir(parents=True)
        path.hardlink_to(read)
        refused(*words(tmp_path / str(place)))
        assert read.read_bytes() == path.read_bytes() == content
        assert path.samefile(read)
        files = [each for each in (tmp_path / str(place)).rglob("*") if each.is_file()]
        assert files == [path]


@pytest.mark.parametrize(
    "command",
    [
        "metrics {run} --html {trace}",
        "metrics {run} --workers 2 --html {trace}",
        "convert {run} {trace}",
        "report {run} --html {trace}",
        "critical-path {run} --html {trace}",
        "what-if {run} --scale compute=0.5 --html {trace}",
        "what-if {run} --trace {trace}",
        "critical-path {run} --rank 0 --overlay {trace}",
        "compare {run} {metrics} --output {out} -q",
    ],
)
def test_a_trace_in_an_input_directory_is_never_overwritten(inputs, tmp_path, command):
    trace = tmp_path / "run" / "rank0.json"
    trace.parent.mkdir()
    shutil.copy(inputs / "rank0.json", trace)
    kept = tmp_path / "out" / "compare.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    if "{metrics}" in command:
        run("metrics", trace, "--output", tmp_path / "kept")
        shutil.copy(tmp_path / "kept" / "metrics.json", kept)
    before = {path: path.read_bytes() for path in (trace, kept)}
    words = {"run": trace.parent, "trace": trace, "metrics": kept, "out": kept.parent}
    said = refused(*words_of(command, **words))
    name = kept if "{metrics}" in command else trace
    assert f"{name}: not written, this command reads {name}; name another output" in said
    assert {path: path.read_bytes() for path in before} == before
    assert {*trace.parent.iterdir(), *kept.parent.iterdir()} == {*before}


def test_an_output_beside_traces_is_written_again(inputs, tmp_path):
    shutil.copy(inputs / "rank0.json", tmp_path)
    for _ in range(2):
        code, said = run("metrics", tmp_path, "--html", tmp_path / "page.html")
        assert code == 0, said


def test_a_store_is_written_again_though_its_ranks_are_read(inputs, tmp_path):
    words = ("ingest", inputs / "rank0.json", "--output", tmp_path / "store")
    for more in ([], [], ["--iteration-regex", "Step#([0-9]+)"]):
        code, said = run(*words, *more)
        assert code == 0, said


def test_output_into_an_input_directory_is_refused(tmp_path):
    folder = tmp_path / "rank0"
    folder.mkdir()
    with guarded():
        note_inputs([folder])
        with pytest.raises(FastcommError, match="this command reads"):
            check_no_input(folder / "sub" / ".." / "page.html")
        check_no_input(tmp_path / "page.html")


@pytest.fixture
def device(tmp_path):
    """A device of its own like /dev/null or /dev/full, where they can be made."""

    def make(minor):
        path = tmp_path / f"device{minor}"
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
        except OSError:
            pytest.skip("no device can be made here")
        return path

    return make


@pytest.mark.parametrize("minor", [3, 7])
def test_a_device_is_never_replaced(inputs, device, minor):
    path = device(minor)
    before = path.lstat()
    for words in ("dpro convert {i}/trace.json", "metrics {i}/rank0.json --html"):
        said = refused(*words_of(words, i=inputs), path)
        assert "not written, it is no regular file; name another file" in said
    assert path.lstat() == before


def test_a_file_created_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "page.html"

    def write():
        with aside(path) as unfinished:
            unfinished.write_text("page")
            path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FastcommError, match=r"is a symbolic link to .*elsewhere"):
        write()
    assert path.is_symlink()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_below_a_linked_directory_is_written(tmp_path):
    """Where a directory is, is for the user to say."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with aside(tmp_path / "link" / "page.html") as new:
        new.write_text("page")
    assert Path(tmp_path / "real" / "page.html").read_text() == "page"
