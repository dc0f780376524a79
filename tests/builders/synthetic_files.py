"""Files of synthetic jobs."""

import json

from hypothesis import strategies as st

from fastcomm.synthetic.job import FAULTS, IDLE_FAULTS, Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.traces import text

LINK = 50e9


SMALL = {"steps": 2, "layers": 2, "micro_batches": 2}


VARIANTS = [
    Variant.TODAY,
    Variant.BASE_LAST,
    Variant.COMPACT,
    Variant.HOST_METADATA,
    Variant.UNDESCRIBED,
    Variant.BASE_LAST | Variant.COMPACT | Variant.HOST_METADATA,
]


def possible(fault, pp, ep, edp, changes):
    """Whether a job has what the fault is about."""
    if fault == "hot_expert":
        return ep > 1 and changes.get("layers", 2) > 1
    return {"slow_link": ep * edp, "imbalanced_stage": pp}.get(fault, 2) > 1


shapes = st.builds(
    lambda tp, pp, ep, edp, fault, changes: Job.of(
        tp * pp * ep * edp,
        **dict(tp=tp, pp=pp, dp=ep * edp, ep=ep, **changes),
        fault=fault if possible(fault, pp, ep, edp, changes) else "slow_gpu",
    ),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 2),
    st.sampled_from((*FAULTS, *IDLE_FAULTS)),
    st.fixed_dictionaries(
        {"steps": st.integers(1, 2), "micro_batches": st.integers(1, 5)},
        optional={
            "layers": st.integers(1, 2),
            "hidden": st.integers(1, 5000),
            "tokens": st.integers(8, 5000),
            "bucket": st.integers(1, 10**8),
            "layer_ns": st.integers(300_000, 3_000_000),
            "skew_ns": st.integers(0, 100_000),
            "slowdown": st.integers(0, 80),
            "straggler": st.just(0) | st.none(),
            "seed": st.integers(0, 2**40),
        },
    ),
)


def written(job, rank, variant=Variant.TODAY, filler_bytes=0):
    return json.loads(b"".join(text(job, rank, "name", variant, filler_bytes)))
