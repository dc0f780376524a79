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
_SIGN_BIT = 63
_TOPS = int.from_bytes(b"\x80" * 8, "little") - (1 << 64)
_FIRST_TOP, _SECOND_TOP = 0x80, 0x8000
_SEVENS = int.from_bytes(b"\x7f" * 8, "little")
_ODD_1, _EVEN_1 = 0x007F007F007F007F, 0x7F007F007F007F00
_ODD_2, _EVEN_2 = 0x00003FFF00003FFF, 0x3FFF00003FFF0000
_ODD_4, _EVEN_4 = 0x000000000FFFFFFF, 0x0FFFFFFF00000000
_TAG_LIMIT = 1 << 32  # a field's number has at most 29 bits


@kernel
def varint(text: Address, i: int, end: int) -> tuple[int, int]:
    """Return the number at `i`, as a signed 64-bit integer, and the index behind it."""
    word = load64(text, i)
    stops = ~word & _TOPS
    at, shift, value = i, 0, 0
    if stops == 0:
        # Eight bytes of seven bits each, two by two.
        value = word & _SEVENS
        value = (value & _ODD_1) | (value & _EVEN_1) >> 1
        value = (value & _ODD_2) | (value & _EVEN_2) >> 2
        value = (value & _ODD_4) | (value & _EVEN_4) >> 4
        at, shift = i + 8, 56
    while at < end:
        part = byte(text, at)
        at += 1
        if shift < _SIGN_BIT:
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
def any_field(text: Address, i: int, end: int) -> tuple[int, int, int]:
    """Return the field at `i`, as `field` does, whatever its tag and value."""
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


@kernel
def field(text: Address, i: int, end: int) -> tuple[int, int, int]:
    """Return the tag and the value of the field at `i`, and the index behind it.

    Most have a tag of one byte, and a number or size of one or two, which are read here.

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
    word = load64(text, i)
    tag, value, after = word & 0xFF, word >> 8 & 0x7F, i + 2
    if word & _SECOND_TOP:
        value |= word >> 9 & 0x3F80
        after = i + 3
        word |= word >> 16
    is_short = word & _FIRST_TOP == 0 and tag & 5 == 0 and tag >= 8
    after += value if tag & 7 == BYTES else 0
    if is_short and after <= end:
        return tag, value, after
    return any_field(text, i, end)
