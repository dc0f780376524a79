"""Workload cards of CCL-Bench: YAML that says how a run was laid out.

Every key may be missing, and unknown ones are ignored. A size that is no number is an error,
since tags would be wrong; anything else that cannot be used is a warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from fastcomm import inputs
from fastcomm.checks import refuse
from fastcomm.readers.config import Config, Parallel, whole

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card: what it says of the job, and what of it cannot be right."""

    config: Config
    total_count: int | None = None  # ranks of the job
    warnings: tuple[str, ...] = ()


def find_card(directory: Path) -> Path | None:
    """`<name>/<name>.yaml`, else the only `*.yaml` of the directory."""
    named = directory / f"{directory.resolve().name}.yaml"
    if named.is_file():
        return named
    cards = [path for path in directory.glob("*.yaml") if path.is_file()]
    return cards[0] if len(cards) == 1 else None


def read_card(path: Path) -> Card:
    """Read a card; ConfigError where it is no card at all, or a size in it no number."""
    data = _load(path)
    plan = _section(data, path, "Model-executor", "model_plan_parallelization")
    hardware = _section(data, path, "workload", "hardware")
    warnings: list[str] = []
    parallel = _parallel(plan, f"{path}: model_plan_parallelization")
    name = _section(data, path, "Model-executor", "framework").get("name")
    parallel = _laid_out(parallel, name, path, warnings)
    total = whole(_section(hardware, path, "xpu_spec"), "total_count", f"{path}: xpu_spec")
    _check_total(parallel, total, path, warnings)
    bandwidths = _section(hardware, path, "network_topo").get("bandwidth_gbps")
    scale_out, scale_up = _bandwidths(bandwidths, path, warnings)
    config = Config(parallel=parallel, scale_out=scale_out, scale_up=scale_up)
    return Card(config=config, total_count=total, warnings=tuple(warnings))


def _load(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file, parsed safely."""
    data = inputs.yaml(path)
    if not isinstance(data, dict):
        refuse(f"{path}:", "card", data, "a mapping of keys to values")
    return data


def _section(data: Mapping[str, Any], path: Path, *keys: str) -> Mapping[str, Any]:
    """The mapping under these keys; an empty one where there is none."""
    for key in keys:
        found = data.get(key)
        if found is not None and not isinstance(found, dict):
            refuse(f"{path}:", key, found, "a mapping")
        data = found or {}
    return data


def _parallel(plan: Mapping[str, Any], where: str) -> Parallel:
    """The sizes of a card; a dp_shard of -1 is what the others leave."""
    replicate = whole(plan, "dp_replicate", where)
    rest = plan.get("dp_shard") == -1
    shard = None if rest else whole(plan, "dp_shard", where)
    dp = whole(plan, "dp", where)
    if not rest and (shard or replicate):
        dp = (shard or 1) * (replicate or 1)
    tp, pp, cp, ep = (whole(plan, name, where) for name in ("tp", "pp", "cp", "ep"))
    return Parallel(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, dp_replicate=replicate)


def _laid_out(parallel: Parallel, name: object, path: Path, warnings: list[str]) -> Parallel:
    """The sizes with the order of the framework of that name."""
    text = str(name or "").lower()
    known = next((part for part in FRAMEWORKS if part in text), None)
    if known is None:
        if text:
            warnings.append(
                f"{path}: framework {text[:40]!r} is not one of {', '.join(FRAMEWORKS)}:"
                " ranks are taken to be laid out as Megatron's"
            )
        return parallel
    etp = 1 if known in _SERVING and (parallel.ep or 1) > 1 else None
    return replace(parallel, framework=FRAMEWORKS[known], etp=etp)


def _check_total(
    parallel: Parallel, total: int | None, path: Path, warnings: list[str]
) -> None:
    sizes = {name: getattr(parallel, name) or 1 for name in ("dp", "tp", "pp", "cp")}
    if total is not None and parallel.dp is not None and prod(sizes.values()) != total:
        words = " * ".join(f"{name} {size}" for name, size in sizes.items())
        warnings.append(
            f"{path}: total_count is {total}, but {words} is {prod(sizes.values())}"
        )


def _bandwidths(
    found: object, path: Path, warnings: list[str]
) -> tuple[float | None, float | None]:
    """Bytes per second between and inside nodes, from [scale_out, scale_up] in Gbit/s."""
    if found is None:
        return None, None
    if isinstance(found, list) and len(found) == 2 and all(map(_is_speed, found)):  # noqa: PLR2004
        return found[0] * _GBPS, found[1] * _GBPS
    warnings.append(
        f"{path}: bandwidth_gbps is not two numbers [scale_out, scale_up]: not used"
    )
    return None, None


def _is_speed(found: object) -> TypeGuard[float]:
    return (
        isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < _FASTEST
    )
