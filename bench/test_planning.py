"""The search of a trainer's strategies: its space priced and ranked."""

from fastcomm.models import load
from fastcomm.planning import kernels, price
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import Plan
from fastcomm.planning.search import candidates, rank

JOB = Plan(
    model=load("llama3-70b"),
    gpu="h100",
    gpus=256,
    global_batch=512,
    seq_len=8192,
    node_bytes_per_s=400e9,
    domain=8,
)


def forget():
    """Empty what strategies share: layers, kernels and collectives."""
    tables = (kernels.matmul, kernels.flash, kernels.inside)
    for table in (*tables, price._whole_stack):
        table.cache_clear()


def test_trainer_space(bar):
    plans = list(candidates(JOB, {}))
    some = plans[:: len(plans) // 60]

    def searched():
        forget()
        return rank(JOB, {}, Constants())

    def one_by_one():
        for plan in some:
            forget()
            price.price_plan(plan, Constants())

    bar(
        "plan_search",
        searched,
        one_by_one,
        count=len(plans),
        yardstick_count=len(some),
    )
