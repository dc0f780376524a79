"""Test that reports of ranks recorded in different steps are matched in those they share."""

import sqlite3
from contextlib import closing

import fastcomm
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys

JOB = Job.of(2, tp=1, pp=1, dp=2, ep=1, steps=8, layers=2, micro_batches=2)
WINDOWS = ((0, 5), (2, 7))  # first and last step of each rank, counted from 0


def cut(report, first, last):
    """Keep what a report has of some steps, as if only these were recorded."""
    with closing(sqlite3.connect(report)) as database:
        names = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
            if {"start", "end"}
            <= {column[1] for column in database.execute(f'PRAGMA table_info("{name}")')}
        ]
        marks = database.execute(
            "SELECT start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
            "WHERE COALESCE(text, value) LIKE 'iteration %' ORDER BY start"
        ).fetchall()
        begin, end = marks[first][0], marks[last][1]
        for name in names:
            # What has no end is no event: names of threads and domains.
            database.execute(
                f'DELETE FROM "{name}" WHERE "end" IS NOT NULL AND (start < ? OR start >= ?)',
                (begin, end),
            )
        database.commit()


def skew(run, **options):
    """Number of matched collectives of each operation, and their times, by operation."""
    rows = run.metrics(**options).across.skew
    return {row.op: (row.count, row.skew_mean_ns, row.transfer_mean_ns) for row in rows}


def test_reports_of_other_steps_are_matched_in_those_that_they_share(tmp_path):
    paths = write_nsys(JOB, tmp_path)
    expected = skew(fastcomm.open(tmp_path), steps=(12, 13, 14, 15))
    for path, window in zip(paths, WINDOWS, strict=True):
        cut(path, *window)
    run = fastcomm.open(tmp_path)
    assert skew(run) == expected
    assert run.metrics().across.matching.by["group and order"] == 40
