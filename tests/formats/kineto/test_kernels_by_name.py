"""Test kernels that their names make copies, or work on one device, whatever else they have."""

import pytest
from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions


def parts(tmp_path, *kernels):
    events = [
        k.mark("ProfilerStep#1", 0, 1000),
        *(k.launch(1 + place, place + 1) for place in range(1 + len(kernels))),
        k.kernel("gemm", 100, 300, correlation=1),
        *(
            {**kernel, "args": {**kernel["args"], "correlation": place + 2}}
            for place, kernel in enumerate(kernels)
        ),
    ]
    k.write(tmp_path / "rank0.json", events, world=4)
    return compute_metrics(open_run(tmp_path / "rank0.json"), MetricsOptions()).breakdown.exact


@pytest.mark.parametrize(
    "name",
    [
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_fillBufferAligned",
        "__amd_rocclr_copyBufferRect",
    ],
)
def test_kernels_by_which_hip_copies_are_copies(tmp_path, name):
    exact = parts(tmp_path, k.kernel(name, 500, 200))
    assert exact["compute"] == pytest.approx(0.3)
    assert exact["memcpy"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "name",
    [
        "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float> >(void*)",
        "_ZN12_GLOBAL__N_113oneRankReduceI7FuncSumIfEEEvPv",
    ],
)
def test_a_local_kernel_with_metadata_of_a_collective_is_compute(tmp_path, name):
    collective = k.all_reduce(500, 200)
    exact = parts(tmp_path, {**collective, "name": name})
    assert exact["compute"] == pytest.approx(0.5)
