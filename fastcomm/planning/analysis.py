"""`fastcomm.plan`: the search of a trainer's strategies from Python."""

from typing import Any

from fastcomm.errors import python_names
from fastcomm.isp.options import with_gpus
from fastcomm.option_fields import build, shows
from fastcomm.planning.options import PlanOptions
from fastcomm.planning.search import PlanSearch, search_plans


@shows(PlanOptions)
@python_names()
def plan(**options: Any) -> PlanSearch:
    """Find the fastest strategies that a trainer can run, as `fastcomm plan` does.

    Parameters
    ----------
    **options
        Fields of `PlanOptions`; `gpus` is another name of `world_size`. Required are `model` (a
        preset, a size such as "7B", or a file), the number of GPUs, and the sequences of a
        step, `global_batch`.

    Returns
    -------
    PlanSearch
        Strategies that fit in memory, the fastest first.

    Raises
    ------
    ConfigError
        If an option is unknown, missing or invalid.

    """
    return search_plans(build(PlanOptions, with_gpus(options, "plan"), "plan"))
