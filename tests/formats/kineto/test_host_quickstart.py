"""The job of the page about runs without a GPU, where PyTorch is there."""

import json
import os
import re
import subprocess
import sys

import pytest
from builders.commands import invoke
from builders.places import DOCS

PAGE = DOCS / "host-runs.md"
# An interpreter that has PyTorch, which is no dependency of the tests.
PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)


def has_torch():
    done = subprocess.run([PYTHON, "-c", "import torch"], check=False, capture_output=True)
    return done.returncode == 0


@pytest.mark.skipif(not has_torch(), reason="needs PyTorch: TORCH_PYTHON=.../bin/python")
def test_the_job_of_the_page_is_recorded_and_measured(tmp_path):
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "train.py").write_text(script)
    run = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py"]
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    metrics = json.loads(invoke("metrics", tmp_path / "traces", "--json").stdout)
    assert metrics["ranks"] == [0, 1, 2, 3]
    assert (
        len(metrics["iterations"] if isinstance(metrics["iterations"], list) else [0] * 10)
        == 10
    )
    assert metrics["matching"]["share"] == 1
    assert {group["tag"] for group in metrics["groups"]} == {"DP"}
    assert metrics["breakdown"]["exact"]["exposed_DP"] > 0
