"""Why two runs may not be comparable: other jobs, ranks, layouts, GPUs or steps."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastcomm.comparison.metrics_documents import Object, expected_ranks_of, skipped_of
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import absent, named_ranks, ranks_words, skipped_lines
from fastcomm.units import counted, plural

_UNKNOWN = "OTHER"  # parallelism of groups that no name or pattern tells


def differences_of_jobs(runs: Mapping[str, Object]) -> Iterator[str]:
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


def ranks_left_out(before: Object, after: Object, runs: Mapping[str, Object]) -> Iterator[str]:
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


def differences_of_measurements(before: Object, after: Object) -> Iterator[str]:
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


def differences_of_steps(before: Object, after: Object) -> Iterator[str]:
    """Yield a sentence if the runs have other numbers of steps."""
    yield from _other_number(before, after, "iterations", "step")


def _other_number(before: Object, after: Object, key: str, noun: str) -> Iterator[str]:
    """Yield a sentence if the lists of a key in JSON have other lengths."""
    old, new = (_number(run.get(key)) for run in (before, after))
    if old != new:
        nouns = plural(1 if old == "1" else 2, noun)
        yield f"before has {old} {nouns}, after {new}: totals are not comparable, means are"


def missing_ranks(when: str, run: Object) -> Iterator[str]:
    """Return a sentence on missing and skipped ranks of a run, or nothing if none is."""
    ranks, skipped, expected = run.get("ranks") or [], skipped_of(run), expected_ranks_of(run)
    if len(ranks) < expected:
        yield f"{when}: {ranks_words(len(ranks), expected)}"
        if not skipped:
            count, missing = absent(ranks, expected)
            yield f"{when}: no trace of {plural(count, 'rank')} {missing}"
    for line in skipped_lines(skipped):
        yield f"{when}: skipped {line}"


def _number(value: Any) -> str:
    return "n/a" if value is None else str(len(value) if isinstance(value, list) else value)
