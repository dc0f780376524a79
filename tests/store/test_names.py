"""Test that codes in the metadata of a store are read by name."""

import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.idle_host import faulty
from builders.stored_runs import WHOLE, stored

from fastcomm.errors import TraceFileError
from fastcomm.idle.causes import CAUSE, CAUSES
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.kineto import reader
from fastcomm.store import ABOUT
from fastcomm.store import reader as store_reader
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.schema import TAG_SOURCES

ALL_REDUCE = k.all_reduce(100_000, 10, correlation=3, Process_Group_Ranks="[0, 1]")


@pytest.fixture
def path(tmp_path):
    events = [*faulty("synchronization")[0], ALL_REDUCE]
    trace = reader.read(k.write(tmp_path / "rank0.json", events), WHOLE)
    path = stored(trace, tmp_path / "rank-00000.parquet")
    with_metadata(path, lambda about: about["groups"].update(candidates=[[TAG["DP"], 3]]))
    return path


def read(path):
    """Idle times by cause, their evidence, and the tags of groups."""
    trace = store_reader.read(path, TraceOptions(), column_set="metrics")
    idle = trace.stored_idle["host"]
    return idle.ns.tolist(), idle.evidence.to_pylist(), trace.groups.to_pylist()


def with_metadata(path, change):
    """Let `change` edit the metadata of the file of a rank."""
    with pq.ParquetFile(path) as file:
        table, about = file.read_row_group(0), json.loads(file.metadata.metadata[ABOUT])
    change(about)
    pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about)}), path)


def reverse(about):
    about["names"] = {name: names[::-1] for name, names in about["names"].items()}
    for times in about["idle"].values():
        times["ns"] = [row[::-1] for row in times["ns"]]
        times["evidence"]["cause"] = [
            len(CAUSES) - 1 - code for code in times["evidence"]["cause"]
        ]
    groups = about["groups"]
    groups["tag"] = [len(TAGS) - 1 - tag for tag in groups["tag"]]
    groups["tag_source"] = [len(TAG_SOURCES) - 1 - code for code in groups["tag_source"]]
    groups["candidates"] = [
        fits and [len(TAGS) - 1 - tag for tag in fits] for fits in groups["candidates"]
    ]


def test_names_in_another_order_have_the_same_meaning(path):
    expected = read(path)
    assert expected[1]
    assert expected[2]
    with_metadata(path, reverse)
    assert read(path) == expected


def test_a_file_without_names_has_those_of_the_first_releases(path):
    expected = read(path)
    with_metadata(path, without_later_names)
    assert read(path) == expected


def without_later_names(about):
    without_cause(about, CAUSE["graph_callback"])
    del about["names"]


def test_a_cause_that_a_store_does_not_know_has_no_time(path):
    expected = read(path)
    added = CAUSE["data_loading"]
    assert all(row[added] == 0 for row in expected[0])
    with_metadata(path, partial(without_cause, added=added))
    assert read(path) == expected


def without_cause(about, added):
    del about["names"]["cause"][added]
    for times in about["idle"].values():
        for row in times["ns"]:
            del row[added]
        cause = times["evidence"]["cause"]
        times["evidence"]["cause"] = [code - (code > added) for code in cause]


def test_time_of_a_cause_that_only_the_store_knows_is_of_an_unknown_cause(path):
    ns, evidence, groups = read(path)

    def rename(about):
        about["names"]["cause"][CAUSE["synchronization"]] = "cosmic_rays"

    with_metadata(path, rename)
    expected = np.array(ns)
    expected[:, CAUSE["unknown"]] += expected[:, CAUSE["synchronization"]]
    expected[:, CAUSE["synchronization"]] = 0
    known = [row for row in evidence if row["cause"] != CAUSE["synchronization"]]
    assert read(path) == (expected.tolist(), known, groups)


def test_a_tag_that_only_the_store_knows_is_an_error_where_it_is_used(path):
    expected = read(path)
    with_metadata(path, lambda about: about["names"].update(tag=[*TAGS, "SP"]))
    assert read(path) == expected
    with_metadata(path, lambda about: about["groups"].update(tag=[len(TAGS)]))
    with pytest.raises(TraceFileError, match="damaged"):
        read(path)
