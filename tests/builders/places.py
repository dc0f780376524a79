"""Folders that tests read."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
SCHEMAS = ROOT / "fastcomm" / "schemas"
RECORDED = TESTS / "data"  # by the project itself
JOBS = TESTS / "jobs" / "recorded"  # real PyTorch jobs with planted faults
