"""`search_strategies`: the search from Python, InternEvo's or that of a trainer."""

from dataclasses import replace
from typing import Any

from fastcomm.checks import non_default
from fastcomm.errors import ConfigError, python_names
from fastcomm.isp.calibration import setting
from fastcomm.isp.question import numbers, question_of
from fastcomm.isp.result import SearchResult
from fastcomm.isp.search import SearchSweep, search, sweep
from fastcomm.option_fields import build, shows
from fastcomm.planning.options import SearchOptions
from fastcomm.planning.search import PlanSearch, search_plans
from fastcomm.trainers import trainer_of


@shows(SearchOptions)
@python_names()
def search_strategies(**options: Any) -> SearchResult | SearchSweep | PlanSearch:
    """Find the fastest parallel strategies that fit in memory, as `fastcomm isp` does.

    Parameters
    ----------
    **options
        Fields of `SearchOptions`; `gpus` is another name of `world_size`. Required are `model`
        (a preset, a size such as "7B", or a file), the number of GPUs, and the batch of a step,
        `global_batch`. It counts sequences if it has no unit, tokens as in "4Mi"; for
        InternEvo always tokens, and `seq_len` (tokens) is required there.

    Returns
    -------
    PlanSearch, SearchResult or SearchSweep
        Feasible strategies, ranked by tokens/s/GPU. `SearchResult` is that of InternEvo, which
        is searched on clusters without a measured GPU, with options of its own, and with
        `trainer="internevo"`. With several `seq_len` it is `SearchSweep`, with a search for
        each of them and each number of GPUs.

    Raises
    ------
    ConfigError
        If an option is unknown, missing or invalid.

    """
    if "gpus" in options:
        if "world_size" in options:
            raise ConfigError("search_strategies: pass gpus or world_size, which are the same")
        options["world_size"] = options.pop("gpus")
    search_options = build(SearchOptions, options, "search_strategies")
    for name in ("compat", "compat_tables", "strict_batch", "overlap_wdp"):
        if name in non_default(search_options):
            raise ConfigError(f"{name}: use fastcomm.compat.isp.search_strategies instead")
    if trainer_of(search_options) != "internevo":
        return search_plans(search_options)
    hardware, question = setting(search_options), question_of(search_options)
    lengths = numbers(search_options.seq_len, "sequence length") or ()
    if len(lengths) > 1:
        return sweep(question, hardware.cluster, lengths, hardware.attention)
    result = search(question, hardware.cluster, attention=hardware.attention)
    return replace(result, calibration=hardware.calibration)
