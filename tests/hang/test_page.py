"""Test the page of `fastcomm hang`: its graph, its tables, and names that are no text."""

import json

import pytest
from builders.commands import invoke
from builders.hang_files import dump_of, write_dumps
from builders.html_page import HOSTILE, assert_sound, charts, parsed, tips, without_scripts
from builders.shared_data import needs, path_of

from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.page import page
from fastcomm.show.pages import html


def page_of(folder):
    return parsed(without_scripts(html(page(diagnose_hang(folder), "dumps"))))


def edges_of(tree):
    chart = charts(tree)["chain-graph"][0]
    return list(chart.all("path", fill="none"))


def test_the_command_writes_the_page(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    target = tmp_path / "hang.html"
    invoke("hang", folder, "--html", target, code=5)
    tree = parsed(without_scripts(target.read_text("utf-8")))
    assert_sound(tree)
    assert next(tree.all("h1")).text.startswith("Rank 5 never called")


def test_the_graph_leads_from_ranks_over_calls_to_the_culprit(tmp_path):
    tree = page_of(write_dumps(tmp_path / "job", 32, absent=22))
    assert_sound(tree)
    texts = tips(charts(tree)["chain-graph"][0])
    assert "rank 22: culprit" in texts
    assert "ranks 20-21, 23: wait" in texts
    assert any(text.startswith("all_reduce #4 of TP group mesh_tp") for text in texts)
    # Others stand in a call of all, which waits for the four ranks; three of them stand in
    # theirs, which waits for the culprit.
    assert len(edges_of(tree)) == 5
    assert len(list(next(tree.all(id="chain")).all("tr"))) == 3


def test_a_culprit_without_a_dump_has_a_dashed_box(tmp_path):
    tree = page_of(write_dumps(tmp_path / "job", 8, absent=5, without=[5]))
    box = next(tree.all("rect", stroke_dasharray=...))
    assert box.attrs["data-tip"] == "rank 5: culprit, no dump"


def test_a_wide_graph_counts_what_it_leaves_out(tmp_path):
    # All 20 groups wait for one rank of theirs; one of each is absent.
    folder = write_dumps(tmp_path / "job", 80)
    for path in folder.glob("rank_*.json"):
        rank = int(path.stem.partition("_")[2])
        dump = json.loads(path.read_text())
        dump["entries"] = [
            call
            for call in dump["entries"]
            if call["collective_seq_id"] < 4
            or (call["process_group"][1] == "mesh_tp" and rank % 4)
        ]
        for call in dump["entries"]:
            if call["collective_seq_id"] == 4:
                call["state"], call["retired"] = "scheduled", False
        path.write_text(json.dumps(dump))
    tree = page_of(folder)
    assert_sound(tree)
    texts = tips(charts(tree)["chain-graph"][0])
    assert len(texts) <= 36
    assert "17 more calls" in texts
    assert "17 more ranks" in texts


def test_a_job_that_does_not_hang_has_a_page(tmp_path):
    folder = write_dumps(tmp_path / "job", 8)
    for path in folder.glob("rank_*.json"):
        dump = json.loads(path.read_text())
        dump["entries"].pop()
        path.write_text(json.dumps(dump))
    tree = page_of(folder)
    assert_sound(tree)
    assert "No hang" in next(tree.all("h1")).text


def test_hostile_names_are_text(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    for path in folder.glob("rank_*.json"):
        path.write_text(path.read_text().replace("mesh_tp", json.dumps(HOSTILE)[1:-1]))
    (folder / "job.log").write_text(f"rank 5 exited with code 3 NVRM: Xid {HOSTILE}\n")
    tree = page_of(folder)
    assert_sound(tree)
    assert not list(tree.all("img"))
    assert any("alert(1)" in row.text for row in tree.all("td"))


@needs("hangs")
@pytest.mark.parametrize(
    "name", ["nccl_p2p_order", "dead_ddp_0", "nccl_stalled", "late_once_sub_0"]
)
def test_recorded_jobs_have_valid_pages(name):
    tree = page_of(path_of("hangs") / name)
    assert_sound(tree)


def test_the_graph_fits_in_its_boxes(tmp_path, browser):
    target = tmp_path / "hang.html"
    folder = write_dumps(tmp_path / "job", 32, absent=22)
    invoke("hang", folder, "--html", target, code=5)
    for width in (1200, 390):
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(target.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        boxes = tab.locator("#chain-graph rect.box")
        places = [boxes.nth(at).bounding_box() for at in range(boxes.count())]
        labels = tab.locator("#chain-graph .plot text")
        for at in range(labels.count()):
            text = labels.nth(at).bounding_box()
            assert any(
                box["x"] <= text["x"] and text["x"] + text["width"] <= box["x"] + box["width"]
                for box in places
            ), labels.nth(at).inner_text()
        tab.close()


def one_more_call_of(ranks, folder):
    """Write dumps in which some ranks alone made a call that all have to make."""
    folder.mkdir()
    for rank in range(8):
        dump = dump_of(rank, 8, 3, absent=rank)
        if rank in ranks:
            dump["entries"].append(dump_of(rank, 8, 3)["entries"][-1])
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump))
    return folder


def test_a_culprit_who_alone_made_a_call_waits_for_the_others(tmp_path):
    hang = diagnose_hang(one_more_call_of([5], tmp_path / "job"))
    assert (hang.kind, hang.culprits, hang.waiting) == ("order", (5,), ())
    assert hang.contents()["waiting"] == []
    assert hang.headline == (
        "Rank 5 waits in all_reduce #4 of the group default_pg of ranks 0-7 for ranks 0-4, "
        "6-7, which have not called it: rank 5 leaves the order of calls that the others keep."
    )
    text = html(page(hang, "dumps"))
    tree = parsed(without_scripts(text))
    assert_sound(tree)
    texts = tips(charts(tree)["chain-graph"][0])
    assert "ranks 0-4, 6-7: waited for" in texts
    assert "rank 5: culprit" in texts
    assert "Who holds them up" not in text
    assert "The arrows lead from who stands in a call that the others did not make" in text


def test_who_stands_in_nothing_is_not_said_to_wait_for_a_stalled_call(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    for rank in range(8):
        dump = dump_of(rank, 8, 3, absent=rank)
        if rank < 4:
            stuck = dump_of(rank, 8, 3, absent=(rank + 1) % 4)
            dump["entries"].append(stuck["entries"][-1])
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.waiting) == ("stalled", (0, 1, 2, 3), ())
    assert "wait for" not in hang.headline
