"""Find the collectives of runs without an accelerator: the host computes and communicates.

PyTorch writes two events for a collective of gloo, MPI or UCC: the operator (`c10d::...`) on
the calling thread, which mostly only enqueues it, and an annotation (`gloo:...`) from the time
at which a thread of the library takes it to its end, waiting included. No event names the
process group, and nothing but order, time and sizes links the two.
"""

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastcomm.readers.kineto.chrome import Scanned
from fastcomm.readers.kineto.operators import (
    ANNOTATION,
    SIGNATURES,
    Call,
    annotation_key,
    call_of,
    detail,
    enqueued,
)
from fastcomm.trace.schema import KIND
from fastcomm_kernels.arrays import NULL, Ints

# Annotations of libraries that work on a device: then the device's work was not recorded.
_ON_DEVICE = re.compile(r"(nccl|xccl|hccl):")


def is_host_run(scanned: Scanned) -> bool:
    """Return whether a trace has collectives of the host, and no sign of an accelerator."""
    kinds = np.unique(scanned.columns["kind"])
    if np.isin([KIND[name] for name in ("kernel", "memcpy", "memset", "runtime")], kinds).any():
        return False
    is_annotation = scanned.columns["kind"] == KIND["annotation"]
    used = np.unique(scanned.columns["name"][is_annotation]).tolist()
    names = [scanned.texts[code] for code in used if code != NULL]
    return any(map(ANNOTATION.match, names)) and not any(map(_ON_DEVICE.match, names))


def with_host_collectives(scanned: Scanned) -> Scanned:
    """Give the host's collectives of a run with an accelerator a kind of their own.

    They are annotations in the file, and run beside those of the device.
    """
    kind = scanned.columns["kind"].copy()
    kind[named_rows(scanned, "annotation", ANNOTATION.match)] = KIND["host_comm"]
    return replace(scanned, columns={**scanned.columns, "kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCollectives:
    """The collectives of a rank that ran on the host, by start. Arrays have a row for each."""

    annotation: Ints  # row of the annotation
    operator: Ints  # row of the c10d operator, or -1
    thread: Ints  # that carried it out: a number of the trace
    called: Ints  # ns, as in the file: start of the operator, or of the annotation
    stop: Ints
    key: tuple[tuple[str, str, str], ...]  # operation; dimensions and type of the input
    calls: tuple[Call, ...]

    def calling_order(self) -> Ints:
        """Return the indices of the collectives in the order in which they were enqueued."""
        return np.argsort(self.called, kind="stable")

    @classmethod
    def of(cls, scanned: Scanned) -> "HostCollectives":
        """Find the collectives of a trace, with the operator that enqueued each."""
        columns = scanned.columns
        annotation = named_rows(scanned, "annotation", ANNOTATION.match)
        operator = _operators(scanned, annotation)
        calls = tuple(
            call_of(scanned, row, own)
            for row, own in zip(operator.tolist(), annotation.tolist(), strict=True)
        )
        return cls(
            annotation=annotation,
            operator=operator,
            thread=columns["thread"][annotation],
            called=columns["start"][np.where(operator >= 0, operator, annotation)],
            stop=columns["stop"][annotation],
            key=tuple(
                (
                    call.operation,
                    detail(scanned, "Input Dims", row),
                    detail(scanned, "Input type", row),
                )
                for call, row in zip(calls, annotation.tolist(), strict=True)
            ),
            calls=calls,
        )


def named_rows(scanned: Scanned, kind: str, accept: Any) -> Ints:
    """Return the rows of the events of a kind whose name is accepted, by start.

    Parameters
    ----------
    scanned
        Events of one file.
    kind
        Key of `KIND`.
    accept
        Function of a name that returns whether to accept it; called once per name.

    """
    columns = scanned.columns
    rows = np.flatnonzero(columns["kind"] == KIND[kind])
    codes, place = np.unique(columns["name"][rows], return_inverse=True)
    accepted = [code != NULL and bool(accept(scanned.texts[code])) for code in codes.tolist()]
    rows = rows[np.array(accepted, np.bool_)[place]]
    return rows[np.argsort(columns["start"][rows], kind="stable")]


def _operators(scanned: Scanned, annotations: Ints) -> Ints:
    """Return the row of the operator that enqueued each collective, or -1.

    `annotations` are the rows of the collectives' annotations. Where an execution trace was
    recorded, the number of an annotation is one above that of its operator. Elsewhere it is the
    first operator with this kind and these tensors that began before and that no earlier
    collective took, since operators and annotations have one order, but for few exceptions.
    """
    columns = scanned.columns
    rows = named_rows(scanned, "cpu_op", SIGNATURES.__contains__)
    number = columns.get("Record function id", np.full(len(columns["kind"]), NULL, np.int64))
    by_number = {int(number[row]): row for row in rows.tolist() if number[row] > 0}
    free: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for row in rows.tolist():
        for key in enqueued(scanned, row):
            free[key].append(row)
    used: set[int] = set()
    result = []
    for annotation in annotations.tolist():
        row = by_number.get(int(number[annotation]) - 1, -1) if number[annotation] > 0 else -1
        if row < 0 or row in used:
            row = _first_free(scanned, annotation, free, used)
        used.add(row)
        result.append(row)
    return np.array(result, np.int64).reshape(-1)


def _first_free(
    scanned: Scanned,
    annotation: int,
    free: Mapping[tuple[str, str], deque[int]],
    used: set[int],
) -> int:
    """Return the first unused operator of equal tensors that began before, or -1."""
    columns = scanned.columns
    rows = free.get(annotation_key(scanned, annotation), deque())
    while rows and rows[0] in used:
        rows.popleft()
    begin = columns["start"][annotation]
    return rows[0] if rows and columns["start"][rows[0]] <= begin else -1
