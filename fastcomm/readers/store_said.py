"""What was said when a run was stored, as JSON, and how what is said later lies over it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast, get_args

from fastcomm.errors import ConfigError
from fastcomm.readers.assembly import ReadOptions
from fastcomm.readers.patterns import Pattern
from fastcomm.trace.iterations import Clock, IterationRule
from fastcomm.trace.parallel import Grid
from fastcomm.trace.tags import TagRule, TagRules


def as_json(options: ReadOptions) -> dict[str, Any]:
    """The options as plain objects; equal options give equal ones."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    # Who said it, and how, changes nothing.
    del plain["tags"]["grid_words"], plain["tags"]["order_words"]
    for rule in plain["tags"]["explicit"]:
        del rule["is_given"]
    return plain


def restored(plain: Mapping[str, Any]) -> ReadOptions:
    """The options of `as_json`; KeyError, TypeError or ValueError where it is none."""
    tags, marks = plain["tags"], plain["iterations"]
    return ReadOptions(
        allow_truncated=bool(plain["allow_truncated"]),
        iterations=IterationRule(
            regex=marks["regex"],
            ranges=tuple((int(a), int(b), int(c)) for a, b, c in marks["ranges"]),
            clock=_clock(marks["clock"]),
        ),
        tags=TagRules(
            explicit=tuple(_rule(rule) for rule in tags["explicit"]),
            grid=None if tags["grid"] is None else Grid(**tags["grid"]),
            guess=bool(tags["guess"]),
        ),
        patterns=tuple(Pattern(**pattern) for pattern in plain["patterns"]),
        whole=bool(plain["whole"]),
    )


def _clock(word: str) -> Clock:
    for clock in get_args(Clock):
        if clock == word:
            return cast("Clock", clock)
    raise ValueError(f"clock {word!r}")


def _rule(plain: Mapping[str, Any]) -> TagRule:
    value = plain["value"]
    value = tuple(value) if isinstance(value, list) else value
    return TagRule(field=plain["field"], value=value, tag=plain["tag"])


def over(said: ReadOptions, stored: ReadOptions) -> ReadOptions:
    """What holds when a store is opened with `said`; equal to `stored` where that adds nothing.

    The clock of iterations is left as it is stored: `store.read` chooses it.

    ConfigError for patterns of kernels, which only the first reading can apply.
    """
    if strange := [each.regex for each in said.patterns if each not in stored.patterns]:
        raise ConfigError(
            f"[[kernels]]: {', '.join(strange)}: what is communication is decided when a run "
            "is stored; ingest the traces again with this configuration"
        )
    return replace(
        stored,
        iterations=_marks(said.iterations, stored.iterations),
        tags=_tags(said.tags, stored.tags),
    )


def _marks(said: IterationRule, stored: IterationRule) -> IterationRule:
    named = said if said.regex is not None or said.ranges else stored
    return replace(named, clock=stored.clock)


def _tags(said: TagRules, stored: TagRules) -> TagRules:
    """The rules of both, those said later first."""
    older = tuple(rule for rule in stored.explicit if rule not in said.explicit)
    return TagRules(
        explicit=(*said.explicit, *older),
        grid=said.grid or stored.grid,
        guess=said.guess or stored.guess,
        grid_words=said.grid_words,
        order_words=said.order_words,
    )
