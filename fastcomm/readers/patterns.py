"""Recognize communication by the names of kernels and copies, the user's patterns first.

The first rule that knows a name decides; `kernel_names` has the last. The host's name of the
operation takes precedence where it is known, since an all-to-all runs as
`ncclDevKernel_SendRecv`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fastcomm import regexes
from fastcomm.readers.kernel_names import Named, recognize
from fastcomm.trace.host_names import HOST_LIBRARIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A regular expression on names of kernels or copies, and what a match tells."""

    regex: str
    library: str
    op: str = "OTHER"
    tag: str | None = None  # for events whose group is unknown
    fused: bool = False  # whether the kernel does more than communicate

    def __call__(self, name: str) -> Named | None:
        """Return what the pattern tells of a name; None if it does not match."""
        if regexes.is_match(self.regex, name):
            return Named(library=self.library, op=self.op, tag=self.tag, fused=self.fused)
        return None


# Tells of a name what it means, or None.
Rule = Callable[[str], Named | None]

# Kernels that communicate: `kernel_names` has the tables.
PATTERNS: tuple[Rule, ...] = (recognize,)

# Libraries that serve every parallelism; the others serve one, or a few.
COLLECTIVE_LIBRARIES = (
    *HOST_LIBRARIES,
    *("NCCL", "RCCL", "oneCCL", "HCCL", "MSCCL++", "torchcomms", "XLA"),
)

# Copies from one device to another.
PEER_COPIES: tuple[Rule, ...] = (
    Pattern(regex=r"^Memcpy PtoP", library="peer copy", op="SendRecv"),
)


def match_name(name: str, rules: tuple[Rule, ...]) -> Named | None:
    """Return what the first rule that knows a name tells of it; None: not communication."""
    return matcher(rules)(name)


@lru_cache(maxsize=16)  # the ranks of a run share names and patterns
def matcher(rules: tuple[Rule, ...]) -> Rule:
    """Return `match_name` for these rules, with a cache of names."""

    @lru_cache(maxsize=1 << 14)
    def match(name: str) -> Named | None:
        return next(filter(None, (rule(name) for rule in rules)), None)

    return match
