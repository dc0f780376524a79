"""The rank of a file by its name, for traces that do not say it."""

import re

# What the name may hold, in words for a message; N is the rank.
NAME_PATTERNS = ("rankN", "rank-N", "rank_N", "rank[N]", "workerN", "kineto_trace_N",
                 "torch_et_N", "nsys_N", "_rN.")  # fmt: skip

_N = r"([0-9]{1,7})(?![0-9])"
# A rank inside of a node or of one parallelism is not that of the job.
_PART = r"(?<!local[-_ ])(?<!node[-_ ])(?<![tpcde]p[-_ ])"
# torch's default "<host>_<pid>.<time>": a host called worker3 is no rank.
_DEFAULT = r"(?!_[0-9]+\.[0-9]+\.pt\.trace)"
_PATTERNS = tuple(
    re.compile(text, re.IGNORECASE)
    for text in (
        rf"(?<![a-z]){_PART}rank[-_=\[ ]?{_N}",
        rf"(?<![a-z0-9-])worker_?{_N}{_DEFAULT}",
        rf"(?<![a-z])(?:kineto_trace|torch_et|nsys)_{_N}",
        rf"[-_.]r{_N}(?=\.)",
    )
)


def rank_from_name(name: str) -> int | None:
    """The rank that the last part of a path names; None where it names none, or two."""
    base = re.split(r"[/\\]", name)[-1]
    for pattern in _PATTERNS:
        if found := {int(match[1]) for match in pattern.finditer(base)}:
            return found.pop() if len(found) == 1 else None
    return None
