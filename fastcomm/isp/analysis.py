"""`fastcomm.search_strategies`: the search of InternEvo's strategies from Python."""

from dataclasses import replace
from typing import Any

from fastcomm.checks import non_default
from fastcomm.errors import ConfigError, python_names
from fastcomm.isp.calibration import setting
from fastcomm.isp.options import SearchOptions, with_gpus
from fastcomm.isp.problem import numbers, problem_of
from fastcomm.isp.result import SearchResult
from fastcomm.isp.search import SearchSweep, search, sweep
from fastcomm.option_fields import build, shows


@shows(SearchOptions)
@python_names()
def search_strategies(**options: Any) -> SearchResult | SearchSweep:
    """Find the fastest strategies of InternEvo that fit in memory, as `fastcomm isp` does.

    Parameters
    ----------
    **options
        Fields of `SearchOptions`; `gpus` is another name of `world_size`. Required are `model`
        (a preset, a size such as "7B", or a file), the number of GPUs, `seq_len` (tokens), and
        the tokens of a step, `global_batch`.

    Returns
    -------
    SearchResult or SearchSweep
        Feasible strategies, ranked by tokens/s/GPU. With several `seq_len`, a search for each
        of them and each number of GPUs.

    Raises
    ------
    ConfigError
        If an option is unknown, missing or invalid.

    """
    name = "search_strategies"
    search_options = build(SearchOptions, with_gpus(options, name), name)
    for original in ("compat", "compat_tables", "strict_batch", "overlap_wdp"):
        if original in non_default(search_options):
            raise ConfigError(f"{original}: use fastcomm.compat.isp.search_strategies instead")
    hardware, problem = setting(search_options), problem_of(search_options)
    lengths = numbers(search_options.seq_len, "sequence length") or ()
    if len(lengths) > 1:
        return sweep(problem, hardware.cluster, lengths, hardware.attention)
    result = search(problem, hardware.cluster, attention=hardware.attention)
    return replace(result, calibration=hardware.calibration)
