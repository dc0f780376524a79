"""Walk the wire format of protobuf: tags, varints, and the bounds of fields.

A message is the bytes from an index up to its end. Functions return the index behind what they
read, or ``~index`` of what does not fit; the value is then one of the problems below.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, byte, load64
from fastcomm_kernels.arrays import NULL

# The wire type of a field, the lowest three bits of its tag.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

# What may be wrong: a value ends behind its message, a varint has more than ten bytes, a tag is
# none of protobuf.
PAST_END, LONG_VARINT, BAD_TAG = 1, 2, 3
_LONGEST = 10 * 7  # bits
_TAG_LIMIT = 1 << 32  # a field's number has at most 29 bits


@kernel
def varint(text: Address, i: int, end: int) -> tuple[int, int]:
    """Return the number at `i`, as a signed 64-bit integer, and the index behind it."""
    value, shift, at = 0, 0, i
    while at < end:
        part = byte(text, at)
        at += 1
        if shift < 63:
            value |= (part & 127) << shift
        elif part & 1:
            value |= NULL
        if part < 128:
            return value, at
        shift += 7
        if shift == _LONGEST:
            return LONG_VARINT, ~i
    return PAST_END, ~i


@kernel
def field(text: Address, i: int, end: int) -> tuple[int, int, int]:
    """Return the tag and the value of the field at `i`, and the index behind it.

    Parameters
    ----------
    text
        Address of the text.
    i, end
        Index of the field, and the end of its message.

    Returns
    -------
    tuple of int
        Tag (number of the field times 8, plus its wire type); number, or size in bytes of a
        field of wire type BYTES; index behind the field, where bytes end.

    """
    tag, at = varint(text, i, end)
    if at < 0:
        return 0, tag, at
    if not 8 <= tag < _TAG_LIMIT:
        return 0, BAD_TAG, ~i
    wire = tag & 7
    if wire == VARINT:
        value, after = varint(text, at, end)
        return tag, value, after
    if wire == BYTES:
        size, at = varint(text, at, end)
        if at < 0:
            return tag, size, at
        if not 0 <= size <= end - at:
            return tag, PAST_END, ~i
        return tag, size, at + size
    if wire not in (FIXED64, FIXED32):
        return tag, BAD_TAG, ~i
    size = 8 if wire == FIXED64 else 4
    if size > end - at:
        return tag, PAST_END, ~i
    value = load64(text, at)
    return tag, value if size == 8 else value & 0xFFFFFFFF, at + size
