"""Compare two runs: metrics, kernels and operators, by their effect on the step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from fastcomm import files
from fastcomm.checks import check_type, invalid_value
from fastcomm.device_work.attribution import absent_name
from fastcomm.device_work.options import KernelKey
from fastcomm.device_work.result import Kernels
from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.metrics.findings.detection import identity
from fastcomm.metrics.findings.idle import KIND as IDLE
from fastcomm.result import Result
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run import (
    SkippedRank,
    absent,
    expected_ranks,
    named_ranks,
    ranks_words,
    skipped_lines,
)
from fastcomm.units import counted, format_ns, format_signed_ns, plural

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics

# What `fastcomm compare` compares.
COMPARED: tuple[KernelKey, ...] = ("name", "operator", "annotation")
_UNKNOWN = "OTHER"  # parallelism of groups that no name or pattern tells
_NUMBERS = ("before_ns", "after_ns", "effect_ns", "before_count", "after_count")
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("by", "name", "category", "state")]
    + [(name, pa.float64()) for name in _NUMBERS]
)
Object = Mapping[str, Any]
# Minimum change as a share of the longer step.
_LEAST = 0.01
_SURE = ("high", "medium")
_FILE = "metrics.json"
_NEEDED = ("iteration", "breakdown", "bandwidth", "volume", "overlap")
_MOST_BYTES = 1 << 28
# What an element of a list is called. Lists that are not here hold no values to compare.
_NAMES: dict[str, Callable[[Object], str]] = {
    "by_rank": lambda row: str(row["rank"]),
    "windows": lambda row: f"{row['from']}-{row['to']}",
    "collectives": lambda row: f"{row['op']}-{row['group_size']}-{row['size_from']}",
}
# Less than this share of a value is no reason for anything.
_SAME = 1e-3
_FLOATS = pa.float64()
_VALUES = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before", "after", "difference", "relative")]
)
_PARTS = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before_ns", "after_ns", "effect_ns")]
    + [("reasons", pa.string())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """Device work of one name in the mean step of a rank, in both runs; None where absent."""

    name: str
    category: str
    before_ns: float | None
    after_ns: float | None
    before_count: float | None
    after_count: float | None

    @property
    def state(self) -> str:
        """Whether the work is "new", "vanished" or "changed"."""
        if self.before_ns is None:
            return "new"
        return "vanished" if self.after_ns is None else "changed"

    @property
    def effect_ns(self) -> float:
        """Time after minus time before, in ns; what is absent takes none."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as a row of the JSON document and of the table."""
        return {**asdict(self), "state": self.state, "effect_ns": self.effect_ns}


KernelChanges = Mapping[KernelKey, tuple[KernelChange, ...]]  # the largest effect first


def kernel_changes(pairs: Iterable[tuple[Kernels, Kernels]]) -> dict[KernelKey, Any]:
    """Return the changes between two runs by key.

    Parameters
    ----------
    pairs
        The device work before and after, by one key each.

    Raises
    ------
    ConfigError
        If the two of a pair have different keys, or a run has no steps.

    """
    changes = {}
    for before, after in pairs:
        if before.by != after.by:
            raise ConfigError(f"kernels by {before.by} before, and by {after.by} after")
        for when, kernels in (("before", before), ("after", after)):
            if not kernels.steps:
                raise ConfigError(f"{when}: no steps, so that kernels have no effect on them")
        changes[before.by] = _changes(before, after)
    return changes


def _changes(before: Kernels, after: Kernels) -> tuple[KernelChange, ...]:
    old, new = (_sums_by_name(kernels) for kernels in (before, after))
    changes = []
    for name in {**old, **new}:
        # Time outside of all operators or annotations is known where there is none.
        none = (None, 0.0, 0.0) if name == absent_name(before.by) else (None, None, None)
        _, before_ns, before_count = old.get(name, none)
        _, after_ns, after_count = new.get(name, none)
        change = KernelChange(
            name=name,
            category=str((new.get(name) or old[name])[0]),
            before_ns=before_ns,
            after_ns=after_ns,
            before_count=before_count,
            after_count=after_count,
        )
        changes.append(change)
    return tuple(sorted(changes, key=lambda change: (-abs(change.effect_ns), change.name)))


def _sums_by_name(kernels: Kernels) -> dict[str, tuple[str, float, float]]:
    """Return the category of each name, and its time and count per step, of any shapes."""
    sums: dict[str, tuple[str, float, float]] = {}
    columns = ["name", "category", "total_ns", "count"]
    for row in kernels.table.select(columns).to_pylist():
        category, time, count = sums.get(row["name"], (row["category"], 0.0, 0.0))
        sums[row["name"]] = (
            category,
            time + row["total_ns"] / kernels.steps,
            count + row["count"] / kernels.steps,
        )
    return sums


def table_of(changes: KernelChanges) -> pa.Table:
    """Return a row per change, in the order of `changes`; times in ns, counts per step."""
    rows = [{"by": key, **one.to_dict()} for key, own in changes.items() for one in own]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """A cause of lost time in either run; costs are ns per step, null where it is not found."""

    kind: str
    ranks: tuple[int, ...]
    text: str  # of the finding after, or before if it is gone
    confidence: str
    before_ns: float | None
    after_ns: float | None
    idle_cause: str | None = None  # of idle time

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """By what the cause is found in another run."""
        return identity(self.kind, self.ranks, self.idle_cause)

    @property
    def effect_ns(self) -> float:
        """Return by how much more it costs after."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as in JSON."""
        return {**asdict(self), "ranks": list(self.ranks), "effect_ns": self.effect_ns}


def cause_changes(before: Object, after: Object) -> tuple[CauseChange, ...]:
    """Return the causes that cost more or less than before, the largest effect first.

    `before` and `after` are metrics as in JSON. Causes of low confidence are left out, unless
    the other run has them with a higher one.
    """
    old, new = _causes(before), _causes(after)
    step = max(_mean_step(before), _mean_step(after))
    changes = []
    for key in dict.fromkeys([*new, *old]):
        was, is_ = old.get(key), new.get(key)
        shown = is_ or was or {}
        costs = [_cost(finding) if finding else None for finding in (was, is_)]
        cause = _idle_cause(shown)
        change = CauseChange(
            kind=shown["kind"],
            ranks=tuple(shown["ranks"]),
            text=shown["text"],
            confidence=shown["confidence"],
            before_ns=costs[0],
            after_ns=costs[1],
            idle_cause=cause,
        )
        is_sure = any(finding and finding["confidence"] in _SURE for finding in (was, is_))
        # Of idle time that is no finding in one of the runs, the metrics have the causes too.
        effects = [change.effect_ns, *_idle_growth(cause, before, after)]
        if is_sure and min(map(abs, effects)) >= _LEAST * step:
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: -abs(change.effect_ns)))


def _causes(metrics: Object) -> dict[tuple[Any, ...], Object]:
    """Return the findings that name causes, by what identifies them in another run."""
    named = ((identity_of(finding), finding) for finding in metrics.get("findings") or ())
    return {key: finding for key, finding in named if key is not None}


def identity_of(finding: Object) -> tuple[Any, ...] | None:
    """Return by what a finding as in JSON is found in another run; None for a symptom."""
    return identity(finding["kind"], finding["ranks"], _idle_cause(finding))


def _idle_cause(finding: Object) -> str | None:
    """Return the cause that a finding on idle time of all ranks names; None for others."""
    cause = (finding.get("evidence") or {}).get("idle_cause")
    return cause if finding["kind"] == IDLE else None


def _cost(finding: Object) -> float:
    """Return the cost of a cause in ns; of idle time that of its largest cause."""
    cause = _idle_cause(finding)
    cost = finding["evidence"]["idle_cause_ns"] if cause else None
    return float(finding["cost_ns"] if cost is None else cost)


def _idle_growth(cause: str | None, *runs: Object) -> Iterator[float]:
    """Yield by how much idle time of a cause grew between two runs, in ns, if known."""
    own = [((run.get("idle") or {}).get(cause), _mean_step(run)) for run in runs if cause]
    times = [share * step for share, step in own if share is not None]
    if own and len(times) == len(own):
        old, new = times
        yield new - old


def _mean_step(metrics: Object) -> float:
    """Return the mean step in ns; 0 if unknown."""
    return float(metrics["iteration"]["mean_ns"] or 0)


def read(path: Path) -> dict[str, Any] | None:
    """Read the metrics in a JSON file, or in the `metrics.json` of a folder; None for others.

    Raises `TraceFileError` for a `metrics.json` without metrics.
    """
    path = path / _FILE if path.is_dir() else path
    if not path.is_file() or path.suffix != ".json" or path.stat().st_size > _MOST_BYTES:
        return None
    try:
        with files.opened(path) as file:
            metrics = orjson.loads(file.read())
        wrong = _wrong(metrics)
    except (OSError, orjson.JSONDecodeError) as error:
        metrics, wrong = None, str(error)
    if wrong and path.name == _FILE:
        # A trace may be any JSON; what is called so has to be metrics.
        raise TraceFileError(f"{path}: no metrics of fastcomm: {wrong}")
    return None if wrong else metrics


def _wrong(document: Any) -> str | None:
    """Return why a document cannot be metrics; None if it can."""
    if not isinstance(document, Mapping):
        return "it is no JSON object"
    lacking = [name for name in _NEEDED if not isinstance(document.get(name), Mapping)]
    return f"it has no {', '.join(lacking)}" if lacking else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A metric in both runs, by its dotted path in the JSON; None if a run does not have it."""

    name: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """The value after minus the value before; None if one is unknown."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        """Return the value as a row of the JSON document and of the table of values."""
        return {**asdict(self), "difference": self.difference, "relative": self.relative}

    @property
    def relative(self) -> float | None:
        """The difference divided by the value before; None if that is 0 or unknown."""
        if self.difference is None or not self.before:
            return None
        return self.difference / abs(self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownChange:
    """A part of the exact partition, in ns of the mean step, and metrics that explain it."""

    name: str
    before_ns: float
    after_ns: float
    reasons: tuple[Value, ...] = ()  # of its parallelism, the most changed first

    @property
    def effect_ns(self) -> float:
        """Time after minus time before, in ns; all parts add up to the change of the step."""
        return self.after_ns - self.before_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a row of the JSON document, with the names of its reasons."""
        return {
            "name": self.name,
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "effect_ns": self.effect_ns,
            "reasons": [reason.name for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Result):
    """The changes between two runs."""

    step: Value  # the mean iteration in ns
    # The largest effect first; none where a breakdown is unknown.
    parts: tuple[BreakdownChange, ...]
    values: tuple[Value, ...]  # every metric, in the order of the JSON
    notes: tuple[str, ...]  # why the runs might not be comparable
    # Of the notes those on other ranks, another layout, other GPUs or other steps: all numbers
    # compare unlike things, and outputs have these notes first.
    differences: tuple[str, ...] = ()
    causes: tuple[CauseChange, ...] = ()  # that are new, gone or changed; the largest first
    incomplete: tuple[str, ...] = ()  # which ranks of which run are missing
    conditions_that_hold: tuple[str, ...] = ()  # of those that were judged
    kernels: KernelChanges | None = None  # None: not compared

    @property
    def other_notes(self) -> tuple[str, ...]:
        """The notes that are no `differences`."""
        return tuple(note for note in self.notes if note not in self.differences)

    @property
    def is_same(self) -> bool:
        """Whether the step time is known, and no metric differs."""
        return self.step.difference == 0 and all(
            value.before == value.after for value in self.values
        )

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "differences": list(self.differences),
            "step": self.step.to_dict(),
            "causes": [cause.to_dict() for cause in self.causes],
            "parts": [value.to_dict() for value in self.parts],
            "values": [value.to_dict() for value in self.values],
            "kernels": None
            if self.kernels is None
            else {key: [one.to_dict() for one in own] for key, own in self.kernels.items()},
            "conditions_that_hold": list(self.conditions_that_hold),
            "incomplete": list(self.incomplete),
            "notes": list(self.notes),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `parts`, `values` and `kernels` (changes); times in ns."""
        parts = [
            {**part.to_dict(), "reasons": " ".join(value.name for value in part.reasons)}
            for part in self.parts
        ]
        values = [value.to_dict() for value in self.values]
        return {
            "parts": pa.Table.from_pylist(parts, schema=_PARTS),
            "values": pa.Table.from_pylist(values, schema=_VALUES),
            "kernels": table_of(self.kernels or {}),
        }

    def figures(self) -> dict[str, str]:
        """Return the mean step of both runs, and the part with the largest change."""
        times = (self.step.before, self.step.after)
        before, after = ("n/a" if value is None else format_ns(value) for value in times)
        part = self.parts[0] if self.parts else None
        change = "n/a" if part is None else f"{part.name} {format_signed_ns(part.effect_ns)}"
        return {"before": before, "after": after, "largest change": change}

    def value(self, name: str) -> Value:
        """Return a metric by its name. Raises `ConfigError`, with similar names, if unknown."""
        check_type(name, str, "value: name", 'a name such as "iteration.mean_ns"')
        for value in self.values:
            if value.name == name:
                return value
        from difflib import get_close_matches

        near = get_close_matches(name, [value.name for value in self.values], cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "the JSON of a comparison lists all names"
        )
        raise ConfigError(f"{name!r} is no metric of either run; {hint}")


def compare(
    before: "Metrics | Object",
    after: "Metrics | Object",
    *,
    whole: tuple[Object, Object] | None = None,
    kernels: "Sequence[tuple[Kernels, Kernels]]" = (),
) -> Comparison:
    """Compare the metrics of two runs.

    Parameters
    ----------
    before, after
        Metrics of the runs: `Metrics`, or the dictionaries that their `to_dict` returns.
    whole
        Metrics of all ranks of both runs, if `before` and `after` are limited to common ranks.
    kernels
        Pairs of `Run.kernels()` before and after, one pair for each key that is compared.

    Returns
    -------
    Comparison
        The change of the step, of its parts, of every metric and of kernels. Times are ns.

    Raises
    ------
    ConfigError
        If an argument is no metrics, or the runs count different bytes.

    """
    before, after = metrics_document(before, "before"), metrics_document(after, "after")
    runs = {"before": before, "after": after}
    if whole is not None:
        runs = dict(zip(runs, whole, strict=True))
    if before.get("bytes") != after.get("bytes"):
        raise ConfigError(
            f"before counts {before.get('bytes')} bytes and after {after.get('bytes')}: "
            "measure both with the same bytes option"
        )
    old, new = dict(scalars(before)), dict(scalars(after))
    names = [*old, *(name for name in new if name not in old)]
    values = {
        name: Value(name=name, before=old.get(name), after=new.get(name)) for name in names
    }
    differences = (*_jobs(runs), *_differences(before, after))
    return Comparison(
        step=values["iteration.mean_ns"],
        causes=cause_changes(before, after),
        parts=_parts(values),
        values=tuple(values.values()),
        notes=(*differences, *_left_out(before, after, runs), *_steps(before, after)),
        differences=differences,
        incomplete=tuple(line for item in runs.items() for line in _incomplete(*item)),
        kernels=kernel_changes(kernels) if kernels else None,
    )


def _jobs(runs: Mapping[str, Object]) -> Iterator[str]:
    """Yield a sentence each if the jobs have other numbers of ranks, groups, or GPUs."""
    old, new = (expected_ranks_of(run) for run in runs.values())
    if old != new:
        yield (
            f"before is of a job of {counted(old, 'rank')}, after of one of {new}: a rank may "
            "have other work, and its communication other peers"
        )
    yield from _layouts(*runs.values())
    old_gpus, new_gpus = (" and ".join(run.get("gpus") or ()) for run in runs.values())
    if old_gpus and new_gpus and old_gpus != new_gpus:
        yield f"before ran on {old_gpus}, after on {new_gpus}: kernels differ with the GPU"


def _layouts(before: Object, after: Object) -> Iterator[str]:
    """Yield a sentence if a parallelism has larger groups in one run than in the other.

    A parallelism that only one run has counts if all groups of the other are known.
    """
    old, new = _group_sizes(before), _group_sizes(after)
    are_known = old and new and not any(_UNKNOWN in sizes for sizes in (old, new))
    join = set.union if are_known else set.intersection
    compared = join({*old}, {*new}) - {_UNKNOWN}
    if any(old.get(tag) != new.get(tag) for tag in compared):
        yield (
            f"before has another layout than after: {_layout(old)} before, {_layout(new)} "
            "after; a rank has other work"
        )


def _group_sizes(run: Object) -> dict[str, int]:
    """Return the size of the largest process group by parallelism, and by `_UNKNOWN`."""
    sizes: dict[str, int] = {}
    for group in run.get("groups") or ():
        tag = group.get("tag") if group.get("tag") in TAGS else _UNKNOWN
        sizes[tag] = max(sizes.get(tag, 1), group.get("size") or 1)
    return sizes


def _layout(sizes: Mapping[str, int]) -> str:
    """Return sizes of groups as a text: "TP 4, PP 2"."""
    return ", ".join(f"{tag} {sizes[tag]}" for tag in TAGS if tag in sizes)


def _left_out(before: Object, after: Object, runs: Mapping[str, Object]) -> Iterator[str]:
    """Return a sentence on which ranks are compared, if a run has further ranks."""
    ranks = set(before.get("ranks") or ()) | set(after.get("ranks") or ())
    lacking = [
        f"{named_ranks(extra)} only {name}"
        for name, run in runs.items()
        if (extra := sorted(set(run.get("ranks") or ()) - ranks))
    ]
    if lacking:
        yield (
            f"compared are the {counted(len(ranks), 'rank')} that both runs have "
            f"({', '.join(lacking)})"
        )


def metrics_document(metrics: "Metrics | Object", name: str) -> Object:
    """Return the metrics without the version of their schema, which is no metric.

    Raises ConfigError, which names the argument, for anything else than metrics.
    """
    document = metrics.contents() if isinstance(metrics, Result) else metrics
    iteration = document.get("iteration") if isinstance(document, Mapping) else None
    if not isinstance(iteration, Mapping) or "mean_ns" not in iteration:
        example = 'compare(open("monday/"), open("tuesday/"))'
        expected = f"a run or its metrics, as in {example}"
        raise invalid_value(f"compare: {name}", metrics, expected)
    return {key: value for key, value in document.items() if key != "schema_version"}


def scalars(value_or_object: Any, name: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a JSON object by their dotted paths; None if unknown."""
    if isinstance(value_or_object, Mapping):
        for key, value in value_or_object.items():
            inner = _by_name(key, value) if isinstance(value, list) else value
            yield from scalars(inner, f"{name}.{key}" if name else key)
    elif value_or_object is None or (
        isinstance(value_or_object, int | float) and not isinstance(value_or_object, bool)
    ):
        yield name, value_or_object


def _by_name(key: str, values: Sequence[Object]) -> Object:
    called = _NAMES.get(key)
    return {called(item): item for item in values} if called else {}


def _parts(values: Mapping[str, Value]) -> tuple[BreakdownChange, ...]:
    """Return the parts of the exact breakdown, the largest effect on the step first."""
    prefix = "breakdown.exact."
    step = values["iteration.mean_ns"]
    parts = []
    for name, share in values.items():
        if not name.startswith(prefix):
            continue
        times = (share.before, step.before), (share.after, step.after)
        if any(one is None for pair in times for one in pair):
            return ()
        was, is_ = (float(part or 0) * float(whole or 0) for part, whole in times)
        part = name.removeprefix(prefix)
        reasons = _reasons(part.removeprefix("exposed_"), values)
        parts.append(BreakdownChange(name=part, before_ns=was, after_ns=is_, reasons=reasons))
    return tuple(sorted(parts, key=lambda part: -abs(part.effect_ns)))


def _reasons(tag: str, values: Mapping[str, Value]) -> tuple[Value, ...]:
    """Return the changed metrics of a parallelism that may explain its exposed time."""
    if tag not in TAGS:
        return ()
    names = (
        f"volume.{tag}.bytes_per_step_per_gpu",
        f"bandwidth.{tag}.avg_bus_bw",
        f"overlap.by_tag.{tag}",
        f"bandwidth.{tag}.events",
    )
    candidates = [values[name] for name in names if name in values]
    changed = [value for value in candidates if abs(value.relative or 0) > _SAME]
    return tuple(sorted(changed, key=lambda value: -abs(value.relative or 0)))


def _differences(before: Object, after: Object) -> Iterator[str]:
    """Yield a sentence on each difference in what was measured: ranks, and kinds of steps."""
    yield from _other_number(before, after, "ranks", "rank")
    old, new = (", ".join(run.get("iterations_found_by", ())) for run in (before, after))
    if old != new:
        yield f"steps are found by {old} before and by {new} after"
    # Results that were kept before there was a choice are by the host's clock.
    old, new = (run.get("iteration_clock", "host") for run in (before, after))
    if old != new:
        yield (
            f"steps are cut by the {old} clock before and by the {new} clock after; measure "
            "both with step boundary host"
        )


def _steps(before: Object, after: Object) -> Iterator[str]:
    """Yield a sentence if the runs have other numbers of steps."""
    yield from _other_number(before, after, "iterations", "step")


def _other_number(before: Object, after: Object, key: str, noun: str) -> Iterator[str]:
    """Yield a sentence if the lists of a key in JSON have other lengths."""
    old, new = (_number(run.get(key)) for run in (before, after))
    if old != new:
        nouns = plural(1 if old == "1" else 2, noun)
        yield f"before has {old} {nouns}, after {new}: totals are not comparable, means are"


def _incomplete(when: str, run: Object) -> Iterator[str]:
    """Return a sentence on missing and skipped ranks of a run, or nothing if none is."""
    ranks, skipped, expected = run.get("ranks") or [], skipped_of(run), expected_ranks_of(run)
    if len(ranks) < expected:
        yield f"{when}: {ranks_words(len(ranks), expected)}"
        if not skipped:
            count, missing = absent(ranks, expected)
            yield f"{when}: no trace of {plural(count, 'rank')} {missing}"
    for line in skipped_lines(skipped):
        yield f"{when}: skipped {line}"


def skipped_of(run: Object) -> list[SkippedRank]:
    """Return the skipped ranks in the JSON of a run."""
    return [
        SkippedRank(rank=record.get("rank"), path=record.get("path", ""), error=record["error"])
        for record in run.get("failed", ())
    ]


def warnings_of(run: Object) -> list[str]:
    """Return the warnings in the JSON document of a run."""
    return run.get("warnings") or []


def expected_ranks_of(run: Object) -> int:
    """Return the number of ranks that a run should have, from its JSON document."""
    return expected_ranks(run.get("ranks") or [], run.get("world_size"), skipped_of(run))


def _number(value: Any) -> str:
    return "n/a" if value is None else str(len(value) if isinstance(value, list) else value)
