"""What to try first: edits that a what-if without edits replays, and what each would save."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path import peers
from fastcomm.critical_path.what_if import Replay
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import Edit, Interval, not_validated, parse_edits
from fastcomm.options import EditOptions

_SUSPECT = 0.01  # of the step: waits that make a rank a suspect
_MOST_SUSPECTS = 8  # ranks, and links
_KERNELS = 5
_MOST_BOTTLENECKS = 64
_SHORT_NAME = 48
_MOST_WORDS = 24
_FASTER = 0.8  # factor of a kernel that is 20 % faster
SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An edit that was tried."""

    edit: Edit
    after_ns: int
    saved_ns: int
    interval: Interval

    def to_dict(self) -> dict[str, Any]:
        """Return the element of `candidates` in the JSON document of a what-if."""
        return {
            "edit": self.edit.text,
            "after_ns": self.after_ns,
            "saved_ns": self.saved_ns,
            "interval": self.interval.to_dict(),
        }


def try_all(replay: Replay, before_ns: int, replay_error_ns: int) -> tuple[Candidate, ...]:
    """Replay a step with each edit of a fixed set; return those that shorten it, best first.

    The edits are, for each parallelism: transfers in half the time, no waits, and transfers
    hidden under compute; each suspect rank and link as its peers; no launch delays; no gaps
    between kernels; and each of the five kernels with the most time 20 % faster (of a run on
    the host, operators). Edits that match nothing in the step are left out.
    """
    tried: list[Candidate] = []
    for edit in _edits(replay, before_ns):
        with suppress(ConfigError):  # nothing in this step that the edit could change
            tried.append(_tried(replay, edit, before_ns, replay_error_ns))
    return _shorter(tried)


def _shorter(tried: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that shorten the step, best first."""
    shorter = [candidate for candidate in tried if candidate.saved_ns > 0]
    return tuple(sorted(shorter, key=lambda candidate: -candidate.saved_ns))


def bottlenecks(replay: Replay, before_ns: int, replay_error_ns: int) -> tuple[Candidate, ...]:
    """Replay a step without the time of each operation on its critical path in turn.

    All events of one name on a rank are one operation. At most the `_MOST_BOTTLENECKS` with the
    most time on the path are tried: a step becomes shorter by this time at most. Returns the
    edits that shorten the step, best first.
    """
    path = replay.critical
    through = path.valid_path.edges
    edges = through[replay.own[through]]
    owner = replay.owner[edges]
    names = replay.events["name"].take(pa.array(owner))
    table = pa.table(
        {"rank": replay.rank[edges], "name": names, "ns": replay.plain.weight[edges]}
    )
    sums = table.group_by(["rank", "name"]).aggregate([("ns", "sum")])
    order = [("ns_sum", "descending"), ("rank", "ascending"), ("name", "ascending")]
    every = _lower_names(replay)
    scale = tuple(
        f"rank:{row['rank']}+name:{selector}=0"
        for row in sums.sort_by(order).slice(0, _MOST_BOTTLENECKS).to_pylist()
        if (selector := _selector(row["name"], every))
    )
    edits = parse_edits(EditOptions(scale=scale)).edits
    return _shorter(_tried(replay, edit, before_ns, replay_error_ns) for edit in edits)


def try_each(replay: Replay, options: Sequence[EditOptions]) -> tuple[Candidate | None, ...]:
    """Replay a step once for each element of `options`, with its first edit.

    The result is None where there is no edit, or where it selects nothing.
    """
    plain = replay.step_after(())
    tried: list[Candidate | None] = []
    for option in options:
        candidate = None
        with suppress(FastcommError):
            for edit in parse_edits(option).edits[:1]:
                candidate = _tried(replay, edit, plain.before_ns, plain.replay_error_ns)
        tried.append(candidate)
    return tuple(tried)


def _tried(replay: Replay, edit: Edit, before_ns: int, replay_error_ns: int) -> Candidate:
    """Replay a step with one edit."""
    after = replay.span([edit])
    interval = Interval.of(after, replay_error_ns, [edit], unvalidated(replay))
    return Candidate(edit=edit, after_ns=after, saved_ns=before_ns - after, interval=interval)


def unvalidated(replay: Replay) -> str | None:
    """Return why measured errors of what-ifs do not apply to a step; None if they do."""
    path = replay.critical
    return not_validated(
        is_host_run=path.about.is_host_run,
        is_replay=path.about.is_replay,
        one_rank=not path.is_joined,
    )


def _edits(replay: Replay, before_ns: int) -> Iterator[Edit]:
    """Yield all edits that are tried."""
    path = replay.critical
    scale, heal, remove, overlap = ([] for _ in range(4))
    for tag in sorted(replay.selectable.targets.get("comm", ())):
        scale.append(f"comm:{tag}={0.5}")
        overlap.append(tag)
        if path.is_joined:
            remove.append(f"wait:{tag}")
    if path.is_joined and not (path.about.is_host_run or path.about.is_replay):
        heal += [f"rank:{rank}" for rank in _slow_ranks(replay, before_ns)]
    if path.is_joined:
        links = peers.slow_links(replay, replay.plain.weight)[:_MOST_SUSPECTS]
        heal += [f"link:{first}-{second}" for first, second in links]
    if not path.about.is_host_run:
        remove += ["launches", "gaps", "host-gaps"]
        scale.append("host=0.5")
    key = "name" if path.about.is_host_run else "kernel"
    scale += [f"{key}:{selector}={_FASTER}" for selector in _longest_kernels(replay)]
    options = EditOptions(
        scale=tuple(scale), heal=tuple(heal), remove=tuple(remove), overlap=tuple(overlap)
    )
    yield from parse_edits(options).edits


def _slow_ranks(replay: Replay, before_ns: int) -> list[int]:
    """Return the ranks that make groups wait longer than they wait themselves, slowest first.

    All groups of a rank count: a slow rank delays each, while those that wait for it in one
    are late in the others.
    """
    later: Counter[int] = Counter()
    for row in replay.critical.across.waits_caused().to_pylist():
        later[row["rank"]] += row["later_ns"]
    return [rank for rank, ns in later.most_common(_MOST_SUSPECTS) if ns > _SUSPECT * before_ns]


def _longest_kernels(replay: Replay) -> list[str]:
    """Return selectors of the compute with the most time on all ranks: kernels, operators."""
    targets = replay.selectable.targets
    if "compute" not in targets:
        return []
    is_kernel = replay.selectable.rows("compute", None)[replay.owner] & replay.own
    names = replay.events["name"].take(pa.array(replay.owner[is_kernel]))
    table = pa.table({"name": names, "ns": replay.plain.weight[is_kernel]})
    sums = table.group_by("name").aggregate([("ns", "sum")]).sort_by([("ns_sum", "descending")])
    longest = sums["name"].to_pylist()[:_KERNELS]
    every = _lower_names(replay)
    return [selector for name in longest if (selector := _selector(name, every))]


def _lower_names(replay: Replay) -> list[str]:
    """Return the names of the events of a step, in lower case."""
    return [name.casefold() for name in pc.unique(replay.events["name"]).to_pylist() if name]


def _selector(name: str, every: Sequence[str]) -> str | None:
    """Return what selects one of the names: itself if it is short, else words of its own.

    A name of C++ fills lines, and its own part is in the middle: /FlashAttnBwdSm90/ fits a
    table, and can be typed. `every` has all names in lower case.
    """
    is_quotable = '"' not in name
    if is_quotable and len(name) <= _SHORT_NAME:
        return f'"{name}"'
    names_with = {
        word: frozenset(at for at, other in enumerate(every) if word.casefold() in other)
        for word in re.findall(r"\w{4,40}", name)[:_MOST_WORDS]
    }
    for number in range(1, 4):
        for some in combinations(names_with, number):
            if len(frozenset.intersection(*(names_with[word] for word in some))) == 1:
                return f"/{'.*'.join(some)}/"
    return f'"{name}"' if is_quotable else None
