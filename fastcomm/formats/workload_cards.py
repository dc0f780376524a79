"""Read workload cards: what a YAML file of CCL-Bench beside the traces states about their job.

Every key is optional, and unknown ones are ignored. A size that is not a number is an error,
since tags would be wrong; anything else that cannot be used is a warning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from fastcomm import files
from fastcomm.checks import refuse
from fastcomm.files import place
from fastcomm.formats.config import Config, integer
from fastcomm.trace.rank_grid import Parallel

# What the name of a framework begins with or contains, and its order of ranks.
FRAMEWORKS = {
    "megatron": "megatron",
    "nemo": "megatron",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "vllm": "vllm",
    "sglang": "vllm",
}
_SERVING = ("vllm", "sglang")  # their experts are split over tensor ranks, not each by them
_GBPS = 1e9 / 8  # bytes per second of a Gbit/s
_FASTEST = 1e9  # Gbit/s, far above any link


def with_card(config: Config, paths: Sequence[str | Path]) -> tuple[Config, tuple[str, ...]]:
    """Merge a configuration over the workload card in one of the directories.

    Returns
    -------
    Config
        The merged configuration.
    tuple of str
        Warnings about the card.

    """
    for path in map(place, paths):
        if not path.is_dir() or not any(path.glob("*.yaml")):
            continue

        if (card := find_card(path)) is not None:
            read = read_card(card)
            return config.with_user_sizes().over(read.config), read.warnings
    return config.with_user_sizes(), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A workload card: the job's layout, and warnings about entries that cannot be right."""

    config: Config
    total_count: int | None = None  # number of ranks of the job
    warnings: tuple[str, ...] = ()


def find_card(directory: Path) -> Path | None:
    """Return `<name>/<name>.yaml`, else the only `*.yaml` of the directory, or None."""
    named = directory / f"{directory.resolve().name}.yaml"
    if named.is_file():
        return named
    cards = [path for path in directory.glob("*.yaml") if path.is_file()]
    return cards[0] if len(cards) == 1 else None


def read_card(path: Path) -> Card:
    """Read a workload card; what it does not state is None.

    Entries that cannot be right are warnings of the card. Raises `ConfigError` if the file or a
    section is not a YAML mapping, or a size in it, other than a dp_shard of -1, is not a
    positive integer.
    """
    data = _load(path)
    plan = _section(data, path, "Model-executor", "model_plan_parallelization")
    hardware = _section(data, path, "workload", "hardware")
    warnings: list[str] = []
    parallel = _parallel(plan, f"{path}: model_plan_parallelization")
    name = _section(data, path, "Model-executor", "framework").get("name")
    parallel = _laid_out(parallel, name, path, warnings)
    total = integer(_section(hardware, path, "xpu_spec"), "total_count", f"{path}: xpu_spec")
    _check_total(parallel, total, path, warnings)
    bandwidths = _section(hardware, path, "network_topo").get("bandwidth_gbps")
    scale_out, scale_up = _bandwidths(bandwidths, path, warnings)
    config = Config(parallel=parallel, scale_out=scale_out, scale_up=scale_up)
    return Card(config=config, total_count=total, warnings=tuple(warnings))


def _load(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file, parsed safely."""
    data = files.yaml(path)
    if not isinstance(data, dict):
        refuse(str(path), "card", data, "a mapping of keys to values")
    return data


def _section(data: Mapping[str, Any], path: Path, *keys: str) -> Mapping[str, Any]:
    """Return the mapping under some keys; empty if it is missing."""
    for key in keys:
        section = data.get(key)
        if section is not None and not isinstance(section, dict):
            refuse(str(path), key, section, "a mapping")
        data = section or {}
    return data


def _parallel(plan: Mapping[str, Any], where: str) -> Parallel:
    """Return the sizes of a card; with a dp_shard of -1, dp follows from the others."""
    replicate = integer(plan, "dp_replicate", where)
    is_inferred = plan.get("dp_shard") == -1
    shard = None if is_inferred else integer(plan, "dp_shard", where)
    dp = integer(plan, "dp", where)
    if not is_inferred and (shard or replicate):
        dp = (shard or 1) * (replicate or 1)
    tp, pp, cp, ep = (integer(plan, name, where) for name in ("tp", "pp", "cp", "ep"))
    return Parallel(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, dp_replicate=replicate)


def _laid_out(parallel: Parallel, name: object, path: Path, warnings: list[str]) -> Parallel:
    """Return the sizes with the order of the named framework."""
    text = str(name or "").lower()
    key = next((part for part in FRAMEWORKS if part in text), None)
    if key is None:
        if text:
            warnings.append(
                f"{path}: framework {text[:40]!r} is not one of {', '.join(FRAMEWORKS)}:"
                " assuming the rank order of Megatron"
            )
        return parallel
    etp = 1 if key in _SERVING and (parallel.ep or 1) > 1 else None
    return replace(parallel, framework=FRAMEWORKS[key], etp=etp)


def _check_total(
    parallel: Parallel, total: int | None, path: Path, warnings: list[str]
) -> None:
    """Warn if the sizes do not multiply to the number of ranks."""
    if total is not None and parallel.dp is not None and parallel.world != total:
        sizes = ((name, getattr(parallel, name) or 1) for name in ("dp", "tp", "pp", "cp"))
        product = " * ".join(f"{name} {size}" for name, size in sizes)
        warnings.append(f"{path}: total_count is {total}, but {product} is {parallel.world}")


def _bandwidths(
    value: object, path: Path, warnings: list[str]
) -> tuple[float | None, float | None]:
    """Return bytes per second between and inside nodes, from two numbers in Gbit/s."""
    if value is None:
        return None, None
    if isinstance(value, list) and len(value) == 2 and all(map(_is_speed, value)):  # noqa: PLR2004
        return value[0] * _GBPS, value[1] * _GBPS
    warnings.append(
        f"{path}: bandwidth_gbps is not two numbers [scale_out, scale_up], so it is ignored"
    )
    return None, None


def _is_speed(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _FASTEST
    )
