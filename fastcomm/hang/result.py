"""The answer to why a job hangs: kind, culprits, who waits, and the evidence."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastcomm.errors import inert
from fastcomm.result import TableResult
from fastcomm.trace.run_traces import named_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedGroup:
    """The process group in which the culprits are waited for."""

    name: str
    desc: str
    parallelism: str | None
    ranks: tuple[int, ...]  # as far as they are known

    @property
    def title(self) -> str:
        """What the group is called in sentences."""
        kind = f"{self.parallelism} group" if self.parallelism else "group"
        name = self.desc or self.name
        return f"{kind} {name} of {named_ranks(self.ranks)}" if self.ranks else f"{kind} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedCall:
    """The collective or message in which the culprits are waited for."""

    op: str
    sequence: int | None

    @property
    def title(self) -> str:
        """Operation and number, as text."""
        return self.op if self.sequence is None else f"{self.op} #{self.sequence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLink:
    """One link of the chain of waiting: ranks that stand in a call, and whom it waits for."""

    ranks: tuple[int, ...]
    group: str
    call: str
    waits_for: tuple[int, ...]
    since_ns: int | None  # how long the first of them waits


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Hang(TableResult):
    """Why a job hangs; `kind` is `none` if it does not."""

    kind: str
    culprits: tuple[int, ...]
    group: WaitedGroup | None
    collective: WaitedCall | None
    place: str | None  # of the one culprit in the code
    waiting: tuple[int, ...]
    missing: tuple[int, ...]  # ranks without a dump
    unreadable: tuple[int, ...]  # ranks whose dump does not tell where they stand
    dumps: int
    world_size: int
    confidence: str
    evidence: tuple[str, ...]
    links: tuple[WaitingLink, ...]  # of the first calls: those that wait for culprits
    calls: int  # in which ranks stand
    next: tuple[str, ...]  # what would decide, or what to do
    failed: tuple[str, ...]  # errors of dumps that are left out
    warnings: tuple[str, ...]

    @property
    def hang(self) -> bool:
        """Whether a call cannot end."""
        return self.kind != "none"

    @property
    def headline(self) -> str:
        """What it is and who, in one sentence."""
        if not self.hang:
            if self.confidence == "low":
                return (
                    f"No hang is seen in the dumps of {self.dumps} of {self.world_size} ranks; "
                    "that there is none is not certain."
                )
            return (
                f"No hang: in the dumps of {self.dumps} of {self.world_size} ranks nothing "
                "waits for long."
            )
        if not self.culprits:
            return _nobody(self)
        return f"{_sentence(self)} {_waiting(self)}".strip()

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that the culprits wait for in a call that nobody else made; else empty."""
        if self.kind != "order" or self.group is None or self.collective is None:
            return ()
        where = self.group.title, self.collective.title
        links = [link for link in self.links if (link.group, link.call) == where]
        if {rank for link in links for rank in link.ranks} - {*self.culprits}:
            return ()
        ranks = {rank for link in links for rank in link.waits_for}
        return tuple(sorted(ranks - {*self.culprits}))

    @property
    def advice(self) -> str:
        """What the kind means, and what to do about it."""
        if self.hang and not self.culprits and self.unreadable:
            return _DUMP_AGAIN
        return _ADVICE[self.kind]

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "hang": self.hang,
            "kind": self.kind,
            "headline": inert(self.headline),
            "culprits": [*self.culprits],
            "group": None
            if self.group is None
            else {
                "name": self.group.name,
                "desc": self.group.desc,
                "parallelism": self.group.parallelism,
                "ranks": [*self.group.ranks],
            },
            "collective": None
            if self.collective is None
            else {"op": self.collective.op, "sequence": self.collective.sequence},
            "place": None if self.place is None else inert(self.place),
            "waiting": [*self.waiting],
            "missing": [*self.missing],
            "unreadable": [*self.unreadable],
            "dumps": self.dumps,
            "world_size": self.world_size,
            "confidence": self.confidence,
            "evidence": [*self.evidence],
            "links": [
                {
                    "ranks": [*link.ranks],
                    "group": link.group,
                    "call": link.call,
                    "waits_for": [*link.waits_for],
                    "since_ns": link.since_ns,
                }
                for link in self.links
            ],
            "next": [*self.next],
            "failed": [*self.failed],
            "warnings": [*self.warnings],
        }

    def to_arrow(self) -> pa.Table:
        """Return the links of the chain of waiting, a row each."""
        return pa.table(
            {
                "ranks": pa.array([[*link.ranks] for link in self.links], pa.list_(pa.int64())),
                "group": pa.array([link.group for link in self.links], pa.string()),
                "call": pa.array([link.call for link in self.links], pa.string()),
                "waits_for": pa.array(
                    [[*link.waits_for] for link in self.links], pa.list_(pa.int64())
                ),
                "since_ns": pa.array([link.since_ns for link in self.links], pa.int64()),
            }
        )

    def figures(self) -> dict[str, str]:
        """Return the key figures, by name."""
        return {
            "kind": self.kind,
            "culprits": named_ranks(self.culprits) if self.culprits else "none",
            "waiting": str(len(self.waiting)),
        }


# What the culprits did: {who} did it in {where}; "s" and "are" follow their number.
_SENTENCES = {
    "missing_rank": "{who} left no dump and {are} waited for in {where}.",
    "not_arrived": "{who} never called {where}.",
    "not_started": "The device of {whom} has not begun {where}.",
    "order": "{who} leave{s} the order of calls that the others keep, who wait in {where}.",
    "mismatch_op": "{who} call{s} another operation where the others call {where}.",
    "mismatch_size": "{who} call{s} {where} with another size than the others.",
    "mismatch_dtype": "{who} call{s} {where} with another type than the others.",
    "mismatch_root": "{who} call{s} {where} with another root than the others.",
    "p2p_unmatched": "A message of {whom} lacks its other side.",
    "p2p_order": "Messages of {whom} wait for each other: each side sends, or receives, first, "
    "or one left out a message.",
    "group_creation": "The creation of a process group does not end, as not all ranks join it: "
    "{whom} stand{s} in it, or hold{s} it up.",
    "stalled": "All members have begun {where}, and it does not end.",
}

# Sides of a message, which are two.
_MESSAGES = {
    "mismatch_size": "The sides of {where} of {whom} have different sizes.",
    "mismatch_dtype": "The sides of {where} of {whom} have different types.",
}

# Where nobody else waits, nobody says which order is right.
_AMONG = "{who} make calls in different orders, and wait for each other in {where}."

# Where nobody else makes the call, the culprits wait for the others.
_ALONE = (
    "{who} wait{s} in {where} for {others}, which have not called it: {whom} leave{s} the "
    "order of calls that the others keep."
)

# What a kind means, and what to do about it. The page of docs has the same.
_ADVICE = {
    "none": "Nothing hangs: what is open is young, or the ranks went on between two dumps. If "
    "the job seems to stand still, dump again after some seconds, into another directory.",
    "missing_rank": "Others wait for ranks of which there is no dump. Look at the launcher's "
    "exit codes, the ends of their logs and the kernel's log of their hosts: out of memory, "
    "a device that fell off, a host that is gone.",
    "not_arrived": "The rank has a dump and stands in no call: it is in its own code. A stack "
    "of it tells where: data loading, a checkpoint, a deadlock of threads, or a loop that "
    "ended early because it had less data.",
    "not_started": "The rank called it, but its device has not begun it: an earlier kernel or "
    "copy does not end. Look at the device (Xid errors, its clock) and at the kernels "
    "before.",
    "order": "A rank left out a call, made one too many, or swapped two. Look for a branch "
    "that not all ranks take: a condition on the loss, on data, on the rank.",
    "mismatch_op": "Members of a group made different calls at one place. Look for a branch "
    "that not all ranks take.",
    "mismatch_size": "Members called it with different sizes. Look at what depends on data: "
    "the last batch, lengths of sequences, routing of experts.",
    "mismatch_dtype": "Members called it with different types. Look at automatic precision "
    "and at what was loaded from a checkpoint.",
    "mismatch_root": "More than one member takes itself for the root. Look at how the root is "
    "computed: its number in the group is not its rank.",
    "p2p_unmatched": "A message has no other side. Look at the first and last micro-batches "
    "of the pipeline schedule, and at stages whose numbers of micro-batches differ.",
    "p2p_order": "Messages wait for each other in a circle. Send and receive in one batch "
    "(batch_isend_irecv), or let every other rank receive first.",
    "group_creation": "Ranks create a process group that others do not join: new_group has to "
    "be called by all ranks, in one order.",
    "stalled": "All members have begun the call, and it does not end: network, device or "
    "library, or a root of a broadcast or reduce that differs. Look at counters of the "
    "network and at NCCL RAS, and repeat with NCCL_DEBUG=INFO.",
}

_DUMP_AGAIN = (
    "The others wait for ranks whose dump cannot be read. Let these dump again; if they no "
    "longer can, look at their exit codes and at the ends of their logs."
)


def _sentence(hang: Hang) -> str:
    """Return what the culprits did, in one sentence."""
    whom, many = named_ranks(hang.culprits), len(hang.culprits) > 1
    call = hang.collective.title if hang.collective else "what others wait in"
    is_among = hang.kind == "order" and many and not hang.waiting
    is_message = hang.collective is not None and hang.collective.sequence is None and many
    of_kind = (is_message and _MESSAGES.get(hang.kind)) or _SENTENCES[hang.kind]
    if hang.awaited:
        of_kind = _ALONE
    elif is_among:
        of_kind = _AMONG
    sentence = of_kind.format(
        who=whom.capitalize(),
        whom=whom,
        where=f"{call} of the {hang.group.title}"
        if hang.group and not (is_message and hang.kind in _MESSAGES)
        else call,
        others=named_ranks(hang.awaited),
        are="are" if many else "is",
        s="" if many else "s",
    )
    return sentence if hang.place is None else f"{sentence[:-1]}; it is in {hang.place}."


def _nobody(hang: Hang) -> str:
    """Return a sentence for a hang in which only what is absent could name the culprit."""
    call = f" in {hang.collective.title}" if hang.collective else ""
    call += f" of the {hang.group.title}" if hang.collective and hang.group else ""
    waiting, one = named_ranks(hang.waiting).capitalize(), len(hang.waiting) == 1
    whom = "a rank that the dumps do not tell"
    if hang.kind == "missing_rank":
        whom = f"{named_ranks(hang.unreadable)}, whose dump cannot be read"
    return (
        f"{waiting} wait{'s' if one else ''}{call} for {whom}: nothing tells who holds "
        f"{'it' if one else 'them'} up."
    )


def _waiting(hang: Hang) -> str:
    """Return how many ranks wait, as a sentence; empty where none does."""
    if not hang.waiting:
        return ""
    verb = "waits" if len(hang.waiting) == 1 else "wait"
    whom = "them" if len(hang.culprits) > 1 else "it"
    return f"{named_ranks(hang.waiting).capitalize()} {verb} for {whom}, directly or not."
