"""Sizes of communication in a Kineto trace, by definition; None where unknown."""

import re
from decimal import Decimal
from fractions import Fraction

# One word of the host, or of a kernel's name, lower case without underscores -> operation.
OPS = {
    "allreduce": "AllReduce",
    "allreducecoalesced": "AllReduce",
    "allgather": "AllGather",
    "allgatherbase": "AllGather",
    "allgathercoalesced": "AllGather",
    "allgatherintotensorcoalesced": "AllGather",
    "reducescatter": "ReduceScatter",
    "reducescatterbase": "ReduceScatter",
    "reducescattercoalesced": "ReduceScatter",
    "reducescattertensorcoalesced": "ReduceScatter",
    "alltoall": "AllToAll",
    "alltoallv": "AllToAll",
    "broadcast": "Broadcast",
    "broadcastoop": "Broadcast",
    "reduce": "Reduce",
    "reduceoop": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "send": "SendRecv",
    "recv": "SendRecv",
    "sendrecv": "SendRecv",
    "pointtopoint": "SendRecv",
    "barrier": "Barrier",
    "allreducebarrier": "Barrier",
}
SIZES = {
    1: "byte char bool unsigned_char signed_char",
    2: "short short_int half bfloat16 c10::half c10::bfloat16",
    4: "int float complexhalf c10::complex<c10::half>",
    8: "long long_int long_long double complexfloat c10::complex<float>",
    16: "complexdouble c10::complex<double>",
}
# Choice: these words name no operation, so the next source is asked.
NO_OPERATION = {"", "wait", "coalesced", "startcoalescing", "endcoalescing"}


def operation(word):
    """None where the word names no operation; OTHER where we do not know it."""
    key = re.sub(r"[^a-z0-9]", "", (word or "").lower())
    return None if key in NO_OPERATION else OPS.get(key, "OTHER")


def items(value):
    """A list, or its text "[0, 1]": (sorted ints, is it complete)."""
    parts = value if isinstance(value, list) else str(value or "").strip("[] ").split(",")
    words = [str(part).strip() for part in parts]
    numbers = [int(word) for word in words if re.fullmatch(r"-?\d+", word)]
    return sorted(numbers), "..." not in words


def number(value):
    """An int of 5, 5.0, Decimal("5.0") or "5"; None of anything else."""
    try:
        exact = Decimal(str(value))
    except ArithmeticError:
        return None
    return int(exact) if exact.is_finite() and exact == int(exact) else None


def positive(value):
    found = number(value)
    return found if found and found > 0 else None


def element_size(name):
    """Bytes of one element of a ScalarType's or a C++ type's name."""
    key = re.sub(r"\s+", "_", str(name or "").strip().lower())
    if "float8_" in key:
        return 1
    return next((size for size, names in SIZES.items() if key in names.split()), None)


def size_of_any_group(trace):
    """The size of all groups of several ranks that the trace lists, if it is the same."""
    listed = [entry.get("pg_size") for entry in trace["groups"]]
    several = {size for size in listed if size != 1}
    return several.pop() if len(several) == 1 else None


# Operation, and the places of a rank's input and output among an operator's arguments.
ARGUMENTS = {
    "c10d::alltoall_base_": ("AllToAll", 1, 0),
    "c10d::_allgather_base_": ("AllGather", 1, 0),
    "c10d::_reduce_scatter_base_": ("ReduceScatter", 1, 0),
    "symm_mem::multimem_all_reduce_": ("AllReduce", 0, 0),
    "symm_mem::multimem_one_shot_all_reduce": ("AllReduce", 0, 0),
    "symm_mem::multimem_one_shot_all_reduce_out": ("AllReduce", 0, 3),
    "symm_mem::multimem_one_shot_reduce_out": ("Reduce", 0, None),
    "symm_mem::multimem_all_gather_out": ("AllGather", 0, 2),
    "symm_mem::one_shot_all_reduce": ("AllReduce", 0, 0),
    "symm_mem::one_shot_all_reduce_out": ("AllReduce", 0, 3),
    "symm_mem::one_shot_all_reduce_copy": ("AllReduce", 1, 1),
    "symm_mem::one_shot_all_reduce_copy_out": ("AllReduce", 1, 4),
    "symm_mem::two_shot_all_reduce_": ("AllReduce", 0, 0),
    "symm_mem::two_shot_all_reduce_out": ("AllReduce", 0, 3),
    "symm_mem::reduce_scatter_out": ("ReduceScatter", 0, 3),
    "symm_mem::nvshmem_broadcast": ("Broadcast", 0, 0),
    "symm_mem::nvshmem_all_to_all": ("AllToAll", 0, 1),
    "symm_mem::all_to_all_vdev": ("AllToAll", None, None),
    "symm_mem::all_to_all_vdev_2d": ("AllToAll", None, None),
    "symm_mem::all_to_all_vdev_2d_offset": ("AllToAll", None, None),
    "_C_custom_ar::all_reduce": ("AllReduce", 1, 2),
    "_C_custom_ar::qr_all_reduce": ("AllReduce", 1, 2),
    "sgl_kernel::all_reduce": ("AllReduce", 1, 2),
    "sgl_kernel::qr_all_reduce": ("AllReduce", 1, 2),
    "vllm::all_reduce": ("AllReduce", 0, 0),
    "vllm::all_gather": ("AllGather", 0, None),
    "vllm::reduce_scatter": ("ReduceScatter", 0, None),
}


def moved_bytes(op, said, annotation, operator):
    """(sent, received, are the splits even), None for what nobody says."""
    counts = [
        said.get(f"{side} msg nelems", said.get(f"{side} msg size")) for side in ("In", "Out")
    ]
    if any(count is not None for count in counts):
        # Choice: the numbers of a word that names no operation (coalesced) are not its bytes.
        if "Collective name" in said and operation(said["Collective name"]) is None:
            return None, None, True
        return metadata_bytes(said, [number(count) for count in counts])
    sent, received = annotation_bytes(annotation) if annotation else None, None
    if sent is None:
        sent = tensor_bytes({"args": said}, 0)
    if operator and ARGUMENTS[operator["name"]][0] == op:
        _, first, second = ARGUMENTS[operator["name"]]
        shown = tensor_bytes(operator, first)
        sent = sent if shown is None else shown
        received = tensor_bytes(operator, second)
    return sent, received, sent == received


def metadata_bytes(said, counts):
    size = element_size(said.get("dtype"))
    # Choice: one overflowed number makes the whole call unknown.
    if size is None or any(count is not None and count < 0 for count in counts):
        return None, None, True
    sent, received = (None if count is None else count * size for count in counts)
    return sent, received, sent == received and even_splits(said)


def even_splits(said):
    # Choice: a list that was cut is not known to be even.
    for key in ("In split size", "Out split size"):
        splits, complete = items(said.get(key))
        if len(set(splits)) > 1 or not complete:
            return False
    return True


def tensor_bytes(host, index):
    dims, types = host["args"].get("Input Dims"), host["args"].get("Input type")
    if not isinstance(types, list) or index is None or index >= len(types):
        return None
    size = element_size(types[index])
    return None if size is None else elements(dims[index]) * size


def annotation_bytes(annotation):
    """All tensors that an annotation names: the input of this rank."""
    dims, types = annotation["args"].get("Input Dims"), annotation["args"].get("Input type")
    if not dims or not isinstance(types, list):
        return None
    tensors = [i for i in range(len(dims)) if types[i : i + 1] not in ([""], ["Scalar"])]
    total = [tensor_bytes(annotation, i) for i in tensors]
    return None if not total or None in total else sum(total)


def elements(shape):
    """Of a shape the product, of a list of shapes the sum of the products."""
    if shape and isinstance(shape[0], list):
        return sum(elements(inner) for inner in shape)
    product = 1
    for length in shape:
        product *= int(length)
    return product


def message_and_payload(op, sent, received, n, even):
    """Sections 1.6 and 4. A missing side is derived only where the group's size is known."""
    if op == "Barrier":
        return 0, 0
    known = [side for side in (sent, received) if side is not None]
    if not known or op not in {*FACTORS, *FACTOR_ONE}:
        return None, None
    if op in {"AllReduce", *FACTOR_ONE}:
        return max(known), max(known)
    if op == "AllToAll":
        # Choice: of the input alone, that is what nccl-tests counts.
        payload = max(known)
        return (share(payload, n) if even and len(known) == 2 else None), payload
    if op in {"AllGather", "Gather"}:
        return one_and_all(sent, received, n)
    return one_and_all(received, sent, n)


def one_and_all(one, whole, n):
    """The part of one rank and the parts of all."""
    if whole is None:
        whole = one * n if n else None
    elif one is None:
        one = share(whole, n)
    return one, None if whole is None else max(whole, one or 0)


def share(payload, n):
    return payload // n if payload is not None and n and payload % n == 0 else None


FACTORS = {
    "AllReduce": 2,
    "AllGather": 1,
    "ReduceScatter": 1,
    "AllToAll": 1,
    "Gather": 1,
    "Scatter": 1,
}
FACTOR_ONE = {"Broadcast", "Reduce", "SendRecv"}


def bus_bytes(op, payload, n):
    """Payload times the factor of nccl-tests, to the nearest integer, half to even."""
    if payload is None:
        return None
    if payload == 0 or n == 1:
        return 0
    # Choice: the factor 1 needs no group size.
    if op in FACTOR_ONE:
        return payload
    return None if n is None else round(Fraction(payload * FACTORS[op] * (n - 1), n))
