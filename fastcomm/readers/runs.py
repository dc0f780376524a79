"""Open a run: a directory, files or globs become one source a rank; a card says its layout.

In a workload card of CCL-Bench (YAML), every key may be missing, and unknown ones are ignored.
A size that is no number is an error, since tags would be wrong; anything else that cannot be
used is a warning.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from fastcomm import files
from fastcomm.checks import refuse
from fastcomm.errors import SchemaError, TraceFileError
from fastcomm.files import is_local, note_inputs, place
from fastcomm.readers import OpenOptions, RankSources, rank_from_name
from fastcomm.readers.config import Config, Parallel, whole
from fastcomm.readers.detection import FORMATS, detect, module
from fastcomm.trace.run import RunTraces, SkippedRank, Source, absent
from fastcomm.trace.trace import Trace
from fastcomm.units import plural

_State = tuple[tuple[str, int, int, int], ...]

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


def steady(source: Source) -> Source:
    """The same source, whose reading fails if somebody changes its file meanwhile."""
    narrow = source.read_narrow
    return replace(
        source,
        read=partial(_read, source.path, source.read),
        read_narrow=narrow and partial(_read, source.path, narrow),
    )


def _read(path: Path, read: Callable[[], Trace]) -> Trace:
    before = _state(path)
    try:
        trace = read()
    except TraceFileError as error:
        _check(path, before, error)
        raise
    except SchemaError as error:
        _check(path, before, error)
        raise TraceFileError(f"{path}: damaged: {error}") from error
    _check(path, before, None)
    return trace


def _check(path: Path, before: _State, error: Exception | None) -> None:
    """TraceFileError where the file is another one than before, or longer, or newer."""
    if before and _state(path) != before:
        raise TraceFileError(
            f"{path}: changed while it was read; wait until it is written, and read it again"
        ) from error


def _state(path: Path) -> _State:
    """Name, place, size and age of a file, or of the files of a directory; empty: none."""
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return (_of(path.name, status),)
        if not is_local(path):
            return tuple(sorted(_of(each.name, each.stat()) for each in path.iterdir()))
        with os.scandir(path) as entries:
            return tuple(sorted(_of(entry.name, entry.stat()) for entry in entries))
    except OSError:
        return ()  # reading it says what is wrong


def _of(name: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns


__all__ = ["FORMATS", "OpenOptions", "open_run"]


def open_run(
    *paths: str | Path, options: OpenOptions | None = None, use_card: bool = True
) -> RunTraces:
    """Find the traces of a run and the rank of each; nothing is read but what tells that.

    A path is a directory (searched to the bottom), a file or a glob. A workload card in a
    directory fills what the configuration leaves open, unless `use_card` is off. Raises
    `FastcommError` where there is no trace, a rank cannot be told, a rank's trace cannot be
    read, two files have one rank, or files contradict the world size. With
    `options.keep_going` files that cannot be read are in `RunTraces.skipped`.
    """
    options = options or OpenOptions()
    config, card_warnings = with_card(options.config, paths if use_card else ())
    options = replace(options, config=config)
    detected = detect(paths, config, keep_going=options.keep_going)
    found = _found(detected.format, detected.files, options)
    note_inputs(each.path for each in found.sources if is_local(each.path))
    run = RunTraces(
        sources=tuple(map(steady, found.sources)),
        world_size=found.world_size,
        warnings=(
            *detected.warnings,
            *found.warnings,
            *card_warnings,
            *_assumed(config, [each.rank for each in found.sources], found.world_size),
        ),
        link_bandwidth=found.link_bandwidth if config.bandwidth is None else config.bandwidth,
        skipped=_numbered([*detected.skipped, *found.skipped], found),
    )
    return replace(
        run,
        warnings=(*run.warnings, *missing(run.expected, run.world_size)),
        untold=run.expected if run.world_size is None else (),
    )


def _numbered(skipped: Sequence[SkippedRank], found: RankSources) -> tuple[SkippedRank, ...]:
    """Give the one skipped file of unknown rank the only rank of the world that is left."""
    unknown = [each for each in skipped if each.rank is None]
    if len(unknown) != 1 or found.world_size is None or place(unknown[0].path).is_dir():
        return tuple(skipped)
    known = {*(each.rank for each in found.sources), *(each.rank for each in skipped)}
    rest = [rank for rank in range(found.world_size) if rank not in known]
    rank = rest[0] if len(rest) == 1 else None
    return tuple(replace(each, rank=rank) if each is unknown[0] else each for each in skipped)


def _assumed(config: Config, ranks: Sequence[int], world: int | None) -> Iterator[str]:
    """Warn where the sizes of the parallelism need more ranks than have a trace."""
    if world is not None or config.parallel.dp is not None:
        return
    size = config.parallel.assumed_world(ranks)
    if size is not None and size > max(ranks) + 1:
        yield (
            f"no trace says how many ranks there are: {config.parallel.words()} is taken for "
            f"{size} ranks; give --dp if there are more"
        )


def _found(name: str, files: Sequence[Path], options: OpenOptions) -> RankSources:
    """The ranks in files of one format; with `keep_going` without those that fail to open."""
    find = module(name).find
    try:
        return find(files, options)
    except TraceFileError:
        if not options.keep_going or len(files) == 1:
            raise
        failures = {path: _failure(name, path, options) for path in files}
        readable = [path for path in files if failures[path] is None]
        if not readable or len(readable) == len(files):
            raise  # the files contradict each other, or none is left
        found = find(readable, options)
    skipped = tuple(each for each in failures.values() if each is not None)
    return replace(found, skipped=(*found.skipped, *skipped))


def _failure(name: str, path: Path, options: OpenOptions) -> SkippedRank | None:
    """Why a file cannot be opened by itself; None where it can."""
    try:
        module(name).find([path], options)
    except TraceFileError as error:
        rank = rank_from_name(path.name)
        return SkippedRank(rank=rank, path=str(path), error=str(error))
    return None


def missing(ranks: Sequence[int], world: int | None) -> list[str]:
    """A warning that names the ranks without a trace, if there are any.

    Without a world size it names those below the last rank, and no number of all ranks.
    """
    size = world if world is not None else max(ranks) + 1
    count, words = absent(sorted(set(ranks)), size)
    of_all = "ranks" if world is None else f"{count} of {size} ranks"
    have = "have" if world is None else plural(count, "has")
    return [f"{of_all} {have} no trace here: {words}"] if count else []


def with_world(
    warnings: Sequence[str], untold: Sequence[int], world: int | None
) -> tuple[str, ...]:
    """Return a run's warnings once its traces are read: missing ranks are those of the world.

    `untold` is that of the run, and `world` what the traces say.
    """
    if world is None or not untold:
        return tuple(warnings)
    guessed = missing(untold, None)
    kept = (text for text in warnings if text not in guessed)
    return (*kept, *missing(untold, world))


def with_card(config: Config, paths: Sequence[str | Path]) -> tuple[Config, tuple[str, ...]]:
    """The configuration over the workload card that lies in one of the directories."""
    for path in map(place, paths):
        if not path.is_dir() or not any(path.glob("*.yaml")):
            continue

        if (card := find_card(path)) is not None:
            read = read_card(card)
            return config.with_given().over(read.config), read.warnings
    return config.with_given(), ()


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
    data = files.yaml(path)
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
