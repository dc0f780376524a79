"""Names of the uniform trace: ``[pid->]op_cat.op_name[.sub_op][~>suffix]``.

Every text is a name: what has no dot is an operation of that whole name.
"""

import re
from dataclasses import dataclass

from fastcomm.trace.schema import OPS

SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
REQUESTS = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
COMPUTATION = frozenset(
    {
        "operator.FW",
        "operator.BW",
        "operator.FW+BW",
        "operator.UPDATE",
        "operator.OUTPUT",
        "ServerOp",
    }
)
OTHER = "other"
# What communication does, as the last part of its name tells; all else is OTHER.
TRANSFERS = frozenset({"SEND", "RECV", *(op for op in OPS if op.lower() != OTHER)})
COMMUNICATION = frozenset(f"Comm.{each}" for each in (*TRANSFERS, *REQUESTS))
HOST = "HOST"
# What a group of tensors goes through before and behind the network.
IN, OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
STAGES = ("QUEUE", IN, OUT)
# Without NCCL's own events: the wait of all ranks for each other, and all of the communication.
COARSE = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")

_FUSED = re.compile(r"\+(?=(?:[^+>]*->)?(?:FW|BW|Comm|UPDATE_)\.)")
_UNDOTTED = ("UPDATE_", "OUTPUT", "I/O")
_DOTTED = 2
_WITH_SUB_OP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A long name in its parts; what it does not have is None."""

    pid: str | None
    standard: str
    op_cat: str
    op_name: str
    sub_op: str | None
    suffix: str | None

    @classmethod
    def of(cls, text: str) -> "Name":
        """Split a long or a standard name."""
        pid, arrow, rest = text.partition("->")
        if not arrow:
            pid, rest = "", text
        standard, tilde, suffix = rest.partition("~>")
        cat, op, sub = _parts(standard)
        return cls(
            pid=pid if arrow else None,
            standard=standard,
            op_cat=cat,
            op_name=op,
            sub_op=sub,
            suffix=suffix if tilde else None,
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensor ids of a communication; () for everything else."""
        ids = self.op_name.split("+") if self.op_cat == "Comm" else []
        return tuple(map(int, ids)) if all(each.isdecimal() for each in ids) else ()

    def __str__(self) -> str:
        return long_name(self.pid, self.standard, self.suffix)


def _parts(standard: str) -> tuple[str, str, str | None]:
    """Category, operation and sub-operation of a standard name."""
    parts = standard.split(".")
    if len(parts) == 1:
        cat = next((cat for cat in _UNDOTTED if standard.startswith(cat)), "")
        return ("END" if standard == "END" else cat), standard, None
    if len(parts) == _DOTTED:
        return parts[0], parts[1], None
    return parts[0], ".".join(parts[1:-1]), parts[-1]


def is_rank(pid: str) -> bool:
    """Whether a pid is of a rank: not of a link between two hosts, nor of a server's thread."""
    return bool(pid) and "::" not in pid and not pid.startswith("server_")


def long_name(pid: str | None, standard: str, suffix: str | None = None) -> str:
    """The parts joined."""
    head = "" if pid is None else f"{pid}->"
    return head + standard + ("" if suffix is None else f"~>{suffix}")


def fused(text: str) -> tuple[Name, ...]:
    """The operations that a fused one joins by "+"; the pid is that of the first."""
    first, *rest = (Name.of(part) for part in _FUSED.split(text))
    return (first, *(Name.of(long_name(first.pid, n.standard, n.suffix)) for n in rest))


def category(standard: str) -> str:  # noqa: PLR0911
    """The fine category, by the tokens of the name."""
    name = Name.of(standard)
    if name.sub_op in SERVER:
        return "ServerOp"
    if name.sub_op in REQUESTS:
        return f"Comm.{name.sub_op}"
    if name.op_cat == "Comm":
        return f"Comm.{name.sub_op if name.sub_op in TRANSFERS else OTHER}"
    if name.op_cat == HOST:
        return "host"
    if name.op_cat in {"FW", "BW", "COMM", "COMP"}:
        return f"operator.{name.op_cat}"
    if name.op_cat.startswith("I/O"):
        return "I/O"
    if name.op_cat.startswith("UPDATE"):
        return "operator.UPDATE"
    if name.op_cat.startswith("OUTPUT"):
        return "operator.OUTPUT"
    return "virtual" if standard == "END" else OTHER


def coarse(fine: str) -> str:
    """The coarse category of a fine one: operator, Comm, I/O, ServerOp, virtual."""
    return fine.partition(".")[0]
