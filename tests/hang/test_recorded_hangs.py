"""Verdicts on the hangs that the project recorded itself; `make hangs` records many anew."""

import gzip
import json
import re

import pytest
from builders.places import RECORDED

from fastcomm.hang.analysis import diagnose_hang

HANGS = RECORDED / "hangs"


@pytest.mark.parametrize("case", sorted(path.name for path in HANGS.iterdir()))
def test_a_recorded_job_has_the_kind_and_culprits_that_were_planted(case):
    truth = json.loads((HANGS / case / "truth.json").read_text())
    hang = diagnose_hang([path for path in (HANGS / case).iterdir() if path.stem != "truth"])
    assert hang.hang == truth["hang"]
    assert {"kind": hang.kind, "culprits": [*hang.culprits]} in truth["accept"]
    assert [*hang.missing] == truth["missing_dumps"]


def test_no_file_of_a_recorded_job_names_a_folder_of_the_machine():
    for path in HANGS.rglob("*.*"):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        assert not re.search(rb"/(?:tmp|home|root|work)/", content), path
