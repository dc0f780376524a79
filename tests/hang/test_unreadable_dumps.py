"""Test that dumps which cannot be read are named, and that no rank is blamed for one."""

import json
import pickle
from codecs import BOM_UTF8

import pytest
from builders.commands import invoke
from builders.hang_files import dump_of, write_dumps
from builders.html_page import assert_sound, charts, parsed, tips, without_scripts

import fastcomm.hang.job_files
from fastcomm.errors import TraceFileError
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.page import page
from fastcomm.show.pages import html


def as_pickle(folder, rank):
    """Replace the JSON dump of a rank by a pickle; return its path."""
    path = folder / f"rank_{rank}.json"
    document = json.loads(path.read_text())
    path.unlink()
    pickled = folder / f"rank_{rank}"
    pickled.write_bytes(pickle.dumps(document, 2))
    return pickled


def cut_text(folder, rank):
    path = folder / f"rank_{rank}.json"
    path.write_text(path.read_text()[:-40])
    return path


def empty(folder, rank):
    path = folder / f"rank_{rank}.json"
    path.write_text("")
    return path


def cut_begin(folder, rank):
    path = as_pickle(folder, rank)
    path.write_bytes(path.read_bytes()[:300])
    return path


DAMAGES = [cut_text, empty, cut_begin]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_dump_is_an_error_that_names_it(tmp_path, damage):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    path = damage(folder, 2)
    with pytest.raises(TraceFileError, match=path.name):
        diagnose_hang(folder)
    assert str(path) in invoke("hang", folder, code=1).stderr


@pytest.mark.parametrize("damage", DAMAGES)
def test_others_still_explain_a_hang(tmp_path, damage):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    path = damage(folder, 2)
    hang = diagnose_hang(folder, keep_going=True)
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))
    assert (hang.unreadable, hang.missing, hang.dumps) == ((2,), (), 7)
    assert str(path) in hang.failed[0]
    assert "the dump of rank 2 is unreadable" in "\n".join(hang.evidence)


@pytest.mark.parametrize("damage", DAMAGES)
def test_nobody_is_blamed_whose_dump_alone_could_tell(tmp_path, damage):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    damage(folder, 5)
    hang = diagnose_hang(folder, keep_going=True)
    assert (hang.hang, hang.culprits, hang.confidence) == (True, (), "low")
    assert hang.waiting == (0, 1, 2, 3, 4, 6, 7)
    assert "wait" in hang.headline
    assert "for rank 5, whose dump cannot be read" in hang.headline
    document = json.loads(invoke("hang", folder, "--keep-going", "--json", code=5).stdout)
    assert (document["culprits"], document["unreadable"]) == ([], [5])
    tree = parsed(without_scripts(html(page(hang, "dumps"))))
    assert_sound(tree)
    assert "rank 5: dump unreadable" in tips(charts(tree)["chain-graph"][0])


FOREIGN = [
    b"Internal Server Error",
    b'{"error": "rank is busy"}',
    b"<html><body>502 Bad Gateway</body></html>",
    b'{"entries": {"0": 1}, "pg_config": {}}',
    b'{"entries": [1, 2], "pg_config": {}}',
    b'{"entries": null, "pg_config": {}}',
    pickle.dumps([1, 2]),
    pickle.dumps({"a": 1}),
    pickle.dumps("text"),
]


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("folder", ["job", "other_host"])
def test_other_content_under_the_name_of_a_dump_is_an_error(tmp_path, content, folder):
    write_dumps(tmp_path / "job", 8, absent=2, without=[2])
    path = tmp_path / folder / "rank_2.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=r"rank_2\.json: "):
        diagnose_hang(tmp_path)
    hang = diagnose_hang(tmp_path, keep_going=True)
    assert (hang.culprits, hang.unreadable, hang.missing) == ((), (2,), ())
    assert str(path) in hang.failed[0]


def test_a_file_of_a_rank_beside_its_dump_is_no_dump(tmp_path):
    write_dumps(tmp_path / "dumps", 8, absent=5, without=[2])
    (tmp_path / "dumps" / "rank_5.pkl").write_bytes(pickle.dumps({"loss": 1}))
    (tmp_path / "losses").mkdir()
    for rank in range(8):
        (tmp_path / "losses" / f"rank_{rank}.json").write_text('{"loss": 1}')
    hang = diagnose_hang(tmp_path)
    assert (hang.culprits, hang.missing, hang.unreadable) == ((5,), (2,), ())


def test_a_dump_may_begin_with_the_mark_of_utf_8(tmp_path):
    folder = write_dumps(tmp_path, 8, absent=5)
    for path in folder.glob("rank_*.json"):
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.dumps) == ((5,), 8)


def test_a_rank_without_a_dump_is_a_suspect_beside_an_unreadable_one(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    empty(folder, 6)
    hang = diagnose_hang(folder, keep_going=True)
    assert (hang.kind, hang.culprits, hang.missing) == ("missing_rank", (5,), (5,))


def test_an_unreadable_dump_of_a_rank_that_is_said_to_be_dead_is_no_doubt(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    empty(folder, 5)
    (folder / "launcher.log").write_text("rank 5 was killed by signal 9\n")
    hang = diagnose_hang(folder, keep_going=True)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "high")


def test_a_dump_that_is_cut_behind_calls_that_are_done_blames_nobody(tmp_path):
    folder = write_dumps(tmp_path / "job", 8)
    path = as_pickle(folder, 5)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.unreadable) == ((), (5,))
    assert "truncated" in hang.warnings[0]


def test_a_dump_that_is_cut_behind_an_open_call_tells_where_its_rank_stands(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    document = dump_of(6, 8, 3, absent=5)
    document["entries"] += [{**document["entries"][-1]} for _ in range(3)]
    (folder / "rank_6.json").unlink()
    content = pickle.dumps(document, 2)
    (folder / "rank_6").write_bytes(content[:-20])
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.unreadable) == ("not_arrived", (5,), ())
    assert 6 in hang.waiting


def test_a_cut_dump_of_a_second_moment_is_no_progress(tmp_path):
    folder = write_dumps(tmp_path / "job" / "one", 8, absent=5)
    second = write_dumps(tmp_path / "job" / "two", 8, absent=5)
    path = as_pickle(second, 3)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    hang = diagnose_hang(folder.parent)
    assert (hang.kind, hang.culprits, hang.unreadable) == ("not_arrived", (5,), ())


def test_binary_files_of_other_names_are_no_dumps(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    (folder / "core.31337").write_bytes(b"\x7fELF\0\0")
    (folder / "worker-3").write_bytes(b"")
    assert diagnose_hang(folder).culprits == (5,)


def test_without_any_dump_the_error_says_why_a_file_is_none(tmp_path):
    (tmp_path / "job7_3").write_bytes(b"\x80\x02}cos\nsystem\n")
    with pytest.raises(TraceFileError, match=r"no dump of a flight recorder; .*refused"):
        diagnose_hang(tmp_path)


def test_files_that_are_too_many_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(fastcomm.hang.job_files, "_MOST_BESIDE", 3)
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    for at in range(5):
        (folder / f"notes{at}.txt").write_text("text")
    (warning,) = diagnose_hang(folder).warnings
    assert warning.startswith("2 of 5 files beside the dumps are not read")


@pytest.mark.parametrize("protocol", [0, 1])
def test_a_pickle_of_an_old_protocol_is_refused_as_one(tmp_path, protocol):
    write_dumps(tmp_path, 4, without=[0])
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps({"entries": []}, protocol))
    with pytest.raises(
        TraceFileError, match=r"rank_0: refused as a pickle: byte 0 is .* protocol"
    ):
        diagnose_hang(tmp_path)
