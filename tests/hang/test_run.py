"""Test `Run.hang`: dumps that lie beside the traces of a run."""

import json

import pytest
from builders.commands import invoke
from builders.hang_files import write_dumps

import fastcomm
from fastcomm.errors import FastcommError
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write(Job.of(ranks=4, steps=1, layers=1), folder)
    write_dumps(folder / "dumps", 4, absent=2)
    return folder


def test_a_run_finds_the_dumps_in_its_directory(traces):
    hang = fastcomm.open(traces).hang()
    assert (hang.kind, hang.culprits) == ("not_arrived", (2,))
    assert hang.to_dict() == fastcomm.diagnose_hang(traces).to_dict()


def test_a_run_of_files_has_the_dumps_beside_them(traces):
    run = fastcomm.open(*sorted(traces.glob("*.json.gz")))
    assert run.hang().culprits == (2,)


def test_a_run_without_dumps_says_what_it_misses(tmp_path):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path)
    with pytest.raises(FastcommError, match="no dump of a flight recorder"):
        fastcomm.open(tmp_path).hang()


def test_a_damaged_dump_is_left_out_where_the_run_may_go_on(traces, tmp_path):
    for path in traces.glob("*.json.gz"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_dumps(tmp_path, 4, absent=2)
    (tmp_path / "rank_0").write_bytes(b"\x80\x02}cos\nsystem\n")
    with pytest.raises(FastcommError, match="refused as a pickle"):
        fastcomm.open(tmp_path).hang()
    assert len(fastcomm.open(tmp_path, keep_going=True).hang().failed) == 1


def test_a_page_never_takes_the_place_of_a_dump(tmp_path):
    folder = write_dumps(tmp_path / "job", 4, absent=2)
    done = invoke("hang", folder, "--html", folder / "rank_1.json", code=1)
    assert "this command reads" in done.stderr
    assert json.loads((folder / "rank_1.json").read_text())["entries"]
