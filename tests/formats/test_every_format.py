"""Test that every format measures equally from its source and from a store."""

import shutil

import pytest
from builders import inspector_logs, operation_tables
from builders.nsys_report import SMALL
from builders.opened import open_run
from builders.shared_data import shared

from fastcomm.formats.config import Config
from fastcomm.formats.tables import table_mapping
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.traces import write


def a_table(folder):
    operation_tables.write(folder / "operations.csv", operation_tables.table())
    return Config(table=table_mapping(operation_tables.MAPPING, "c.toml"))


def a_straggler(folder):
    shutil.copy(shared("replay/straggler/trace-ST.parquet"), folder)


MAKERS = {
    "kineto": lambda folder: write(SMALL, folder, ranks=[0, 5]),
    "sqlite": lambda folder: write_nsys(SMALL, folder, ranks=[0, 1, 5], per_report=2),
    "parquetdir": lambda folder: write_nsys(SMALL, folder, ranks=[0, 5], kind="parquetdir"),
    "no payloads": lambda folder: write_nsys(
        SMALL, folder, ranks=[1], variant=NsysVariant(payload="none")
    ),
    "inspector": inspector_logs.job,
    "table": a_table,
    "production table": a_straggler,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_store_measures_like_its_source_in_every_format(tmp_path, name):
    folder = tmp_path / "source"
    folder.mkdir()
    made = MAKERS[name](folder)
    options = made if isinstance(made, Config) else Config()
    before = compute_metrics(open_run(folder, config=options)).to_dict()
    ingest(plan([folder], tmp_path / "store", config=options))
    after = compute_metrics(open_run(tmp_path / "store")).to_dict()
    assert set(after.pop("warnings")) == set(before.pop("warnings"))
    assert after == before
    assert before["ranks"]
