"""Test reports of a process that drives several devices: each is a rank.

The truth is the same report, in which each device has a process of its own.
"""

import json
import re
import sqlite3
from contextlib import closing

import pytest
from builders.commands import invoke

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys

SMALL = Job.of(ranks=2, steps=2, layers=2)
CALLS = 10**6  # far above any correlation of the report


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of two processes with a device each, and one in which one process has both."""
    folder = tmp_path_factory.mktemp("reports")
    (path,) = write_nsys(SMALL, folder / "two", ranks=(0, 1), per_report=2)
    one = folder / "one.sqlite"
    one.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(one)) as database:
        joined(database)
    return path, one


def joined(database):
    """Give the second process's work and ranges to the first, with other numbers of calls."""
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
    columns = {
        name: [row[1] for row in database.execute(f'PRAGMA table_info("{name}")')]
        for name in tables
    }
    of_kernels = database.execute(
        "SELECT DISTINCT globalPid, deviceId FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY 1"
    ).fetchall()
    (first, _), (second, device) = of_kernels
    assert device == 1
    for table, names in columns.items():
        for column in {"globalPid", "globalTid"}.intersection(names):
            is_second = f"{column} >> 24 = {second >> 24}"
            if "correlationId" in names:
                database.execute(
                    f'UPDATE "{table}" SET correlationId = correlationId + {CALLS}'
                    f" WHERE {is_second}"
                )
            # Threads stay apart: the first process has twice as many.
            database.execute(
                f'UPDATE "{table}" SET {column} = {column} + {first - second} WHERE {is_second}'
            )
    database.commit()


def measured(path, *words):
    return json.loads(invoke("metrics", path, *words, "--json").stdout)


def sums_of(path):
    """Time and number of each kernel of a rank."""
    document = json.loads(invoke("kernels", path, "--json", "--full-names").stdout)
    return {row["name"]: (row["total_ns"], row["count"]) for row in document["rows"]}


def test_each_device_of_a_process_is_a_rank(reports):
    two, one = map(measured, reports)
    assert one["ranks"] == two["ranks"] == [0, 1]
    # The steps of a device are those of the threads that launch its work.
    assert one["iteration"] == two["iteration"]
    assert one["breakdown"]["exact"] == two["breakdown"]["exact"]
    (path, joined_path) = reports
    found, expected = (sums_of(each) for each in (joined_path, path))
    assert found == expected
    (said,) = [text for text in one["warnings"] if "guess" in text]
    names = re.findall(r"GPU \d of process \d+", said)
    assert [name.split()[1] for name in names] == ["0", "1"]


def test_a_configuration_states_the_rank_of_a_device(reports, tmp_path):
    one = reports[1]
    guess = "".join(measured(one)["warnings"])
    process = re.search(r"GPU 0 of process (\d+)", guess)[1]
    config = tmp_path / "fastcomm.toml"
    config.write_text(f'[ranks]\n"one.sqlite:{process}:0" = 1\n"one.sqlite:{process}:1" = 0\n')
    found = measured(one, "--config", config)
    by_rank, guessed = (each["iteration"]["by_rank"] for each in (found, measured(one)))
    assert [row["mean_ns"] for row in by_rank] == [row["mean_ns"] for row in guessed][::-1]
    assert "guess" not in "".join(found["warnings"])


def test_a_device_that_is_hardly_used_is_no_rank(reports, tmp_path):
    path = tmp_path / "one.sqlite"
    path.write_bytes(reports[1].read_bytes())
    with closing(sqlite3.connect(path)) as database:
        # Only the first kernel of the second device is left.
        database.execute(
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 1 AND start >"
            " (SELECT min(start) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 1)"
        )
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE deviceId = 1")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start WHERE deviceId = 1")
        database.commit()
    document = measured(path)
    assert document["ranks"] == [0]
    (said,) = [text for text in document["warnings"] if "the busiest device" in text]
    assert re.search(r"GPU 1 of process \d+: less than 1.0 %", said)
