"""Results of HolisticTraceAnalysis for real traces, and their comparison."""

import gzip
import hashlib
import json
from functools import lru_cache

import pytest
from builders.shared_data import needs, path_of

FOLDER = path_of("critical_path")
needed = needs("critical_path")


def cases():
    """All reference results; none where they are absent."""
    path = FOLDER / "golden.json"
    return json.loads(path.read_text())["cases"] if path.exists() else []


def name_of(case):
    return f"{case['case']}-{int(case['zero_weight_launch_edges'])}"


def each_case():
    """Decorate a test: it runs once a reference result, and is skipped where there is none."""
    found = [pytest.param(case, id=name_of(case)) for case in cases()]
    absent = pytest.param(None, marks=needed)
    return pytest.mark.parametrize("case", found or [absent])


def trace_of(case):
    for folder in (FOLDER, path_of("kineto")):
        if (folder / case["trace"]).exists():
            return folder / case["trace"]
    return path_of("kineto/nccl_2rank_rank0.json.gz")


@lru_cache(maxsize=1)
def document(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def instance_of(case):
    found = case["instance"]
    return tuple(found) if isinstance(found, list) else found or 0


def digest(lines):
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
