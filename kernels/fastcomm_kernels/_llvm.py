"""The few machine instructions that Python has no word for, each with a Python twin.

With the JIT on, kernels compile these to one to six instructions; with `NUMBA_DISABLE_JIT=1`
the twin answers. A test holds the pairs equal. The twins return Python integers, so that a
hash that wraps at 64 bits does so without NumPy's overflow warning.

An *address* is where an array's numbers lie; to the twins it is the array itself. Functions
that hand addresses to each other skip the counting of references, which costs a scanner nine
tenths of its speed. Whoever takes an address keeps the array alive while it is used.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic
from numpy.typing import NDArray

Text = NDArray[np.uint8]
Address = NDArray[Any]

# One test looks at so many bytes, a test for something near at half as many. A text needs as
# many readable ones behind its end.
STEP = 64
HALF = STEP // 2

_WORD = (1 << 64) - 1
_MULTIPLIER = 0xFF51AFD7ED558CCD  # of MurmurHash3's last step
_setting: Any = config


def address_twin(array: NDArray[Any]) -> Address:
    """Where the numbers of a contiguous array lie."""
    return array.reshape(-1)


def byte_twin(text: Address, i: int) -> int:
    """The byte at `i`."""
    return int(text[i])


def put_byte_twin(text: Address, i: int, value: int) -> None:
    """Write the byte at `i`."""
    text[i] = value


def get_twin(column: Address, i: int) -> int:
    """The 64-bit integer at `i`."""
    return int(column[i])


def put_twin(column: Address, i: int, value: int) -> None:
    """Write the 64-bit integer at `i`."""
    column[i] = value


def load64_twin(text: Address, i: int) -> int:
    """Eight bytes from `i`, the first lowest."""
    return int.from_bytes(text[i : i + 8].tobytes(), "little", signed=True)


def mix_twin(state: int, word: int) -> int:
    """A step of a multiplicative hash over 64-bit words, signed here as everywhere."""
    product = ((int(state) ^ int(word)) * _MULTIPLIER) & _WORD
    mixed = product ^ (product >> 32)
    return mixed - (mixed >> 63 << 64)


def trailing_zeros_twin(mask: int) -> int:
    """Zero bits below the lowest set bit of a mask that has one."""
    return (int(mask) & -int(mask)).bit_length() - 1


def count_twin(mask: int) -> int:
    """Set bits of a mask."""
    return int(mask).bit_count()


def up_twin(mask: int, carry: int) -> int:
    """A mask moved up by one place, and what comes in below."""
    return (mask << 1 | carry) & _WORD


def top_twin(mask: int) -> int:
    """The highest bit of a mask."""
    return mask >> 63 & 1


def insides_twin(quotes: int, carry: int) -> int:
    """Bits from each opening quote to before its closing one; `carry`: 1 where one is open."""
    mask, inside = 0, carry
    for k in range(STEP):
        inside ^= quotes >> k & 1
        mask |= inside << k
    return mask


def mask_twin(text: Address, i: int, members: frozenset[int], width: int) -> int:
    """Bits of the `width` bytes from `i` that are `members`."""
    found = np.isin(text[i : i + width], list(members))
    return int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")


# The sets of bytes that a scan looks for.
_BLANKS = frozenset(range(1, 33))
QUOTES = frozenset(b'"')
ESCAPES = frozenset(b"\\")
OPENS = frozenset(b"{[")
CLOSES = frozenset(b"}]")
BREAKS = frozenset(b"\n\r\0")
STRING_STOPS = QUOTES | ESCAPES | frozenset(range(32))
NOT_BLANKS = frozenset(range(256)) - _BLANKS
DELIMITERS = OPENS | CLOSES | _BLANKS | frozenset(b",:")


_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _load(builder: Any, address: Any, i: Any, what: Any, size: int = 1) -> Any:
    place = builder.add(address, builder.mul(i, ir.Constant(_I64, size)))
    loaded = builder.load(builder.inttoptr(place, what.as_pointer()))
    loaded.align = size
    return loaded


def _store(builder: Any, args: Any, what: Any, size: int) -> None:
    place = builder.add(args[0], builder.mul(args[1], ir.Constant(_I64, size)))
    stored = builder.store(
        builder.trunc(args[2], what) if size < 8 else args[2],
        builder.inttoptr(place, what.as_pointer()),
    )
    stored.align = size


def _intrinsic(answer: Any, arguments: int, code: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic of 64-bit arguments; `code` takes the builder and the values."""
    kinds = [types.int64] * arguments

    @intrinsic
    def one(typing: Any, a: Any) -> Any:
        return answer(*kinds), lambda _context, builder, _signature, args: code(builder, args)

    @intrinsic
    def two(typing: Any, a: Any, b: Any) -> Any:
        return answer(*kinds), lambda _context, builder, _signature, args: code(builder, args)

    @intrinsic
    def three(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return answer(*kinds), lambda _context, builder, _signature, args: code(builder, args)

    return (one, two, three)[arguments - 1]


def _ranges(members: frozenset[int]) -> list[tuple[int, int]]:
    """The runs of neighbours in a set of bytes: first and last."""
    firsts = [byte for byte in sorted(members) if byte - 1 not in members]
    lasts = [byte for byte in sorted(members) if byte + 1 not in members]
    return list(zip(firsts, lasts, strict=True))


def _mask(members: frozenset[int], width: int) -> Any:
    """An intrinsic that tests `width` bytes at once and gives the answers as bits."""
    vector = ir.VectorType(_I8, width)

    def splat(byte: int) -> Any:
        return ir.Constant(vector, [byte] * width)

    def code(builder: Any, args: Any) -> Any:
        block = _load(builder, args[0], args[1], vector)
        found = None
        for first, last in _ranges(members):
            # A wrapped difference makes one comparison of a range.
            moved = builder.sub(block, splat(first))
            test = builder.icmp_unsigned("<=", moved, splat(last - first))
            found = test if found is None else builder.or_(found, test)
        bits = builder.bitcast(found, ir.IntType(width))
        return bits if width == STEP else builder.zext(bits, _I64)

    return _intrinsic(types.int64, 2, code)


@intrinsic
def _address(typing: Any, array: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(made.data, _I64)

    return types.int64(array), code


def _byte(builder: Any, args: Any) -> Any:
    return builder.zext(_load(builder, args[0], args[1], _I8), _I64)


def _put_byte(builder: Any, args: Any) -> Any:
    _store(builder, args, _I8, 1)


def _get(builder: Any, args: Any) -> Any:
    return _load(builder, args[0], args[1], _I64, 8)


def _put(builder: Any, args: Any) -> Any:
    _store(builder, args, _I64, 8)


def _load64(builder: Any, args: Any) -> Any:
    return _load(builder, args[0], args[1], _I64)


def _trailing_zeros(builder: Any, args: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
    count = builder.module.declare_intrinsic("llvm.cttz", [_I64], kind)
    return builder.call(count, [args[0], ir.Constant(ir.IntType(1), 1)])


def _count(builder: Any, args: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64])
    return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [_I64], kind), args)


def _up(builder: Any, args: Any) -> Any:
    return builder.or_(builder.shl(args[0], ir.Constant(_I64, 1)), args[1])


def _top(builder: Any, args: Any) -> Any:
    return builder.lshr(args[0], ir.Constant(_I64, 63))


def _insides(builder: Any, args: Any) -> Any:
    mask = args[0]
    for shift in (1, 2, 4, 8, 16, 32):
        mask = builder.xor(mask, builder.shl(mask, ir.Constant(_I64, shift)))
    return builder.xor(mask, builder.sub(ir.Constant(_I64, 0), args[1]))


def _mix(builder: Any, args: Any) -> Any:
    mixed = builder.mul(builder.xor(*args), ir.Constant(_I64, _MULTIPLIER))
    return builder.xor(mixed, builder.lshr(mixed, ir.Constant(_I64, 32)))


def _mask_of(members: frozenset[int], width: int = STEP) -> Any:
    if _setting.DISABLE_JIT:
        return partial(mask_twin, members=members, width=width)
    return _mask(members, width)


if _setting.DISABLE_JIT:
    address, byte, put_byte = address_twin, byte_twin, put_byte_twin
    get, put = get_twin, put_twin
    load64, mix, trailing_zeros = load64_twin, mix_twin, trailing_zeros_twin
    count, up, top, insides = count_twin, up_twin, top_twin, insides_twin
else:
    address = cast("Any", _address)
    byte, put_byte = _intrinsic(types.int64, 2, _byte), _intrinsic(types.void, 3, _put_byte)
    get, put = _intrinsic(types.int64, 2, _get), _intrinsic(types.void, 3, _put)
    load64, mix = _intrinsic(types.int64, 2, _load64), _intrinsic(types.int64, 2, _mix)
    trailing_zeros = _intrinsic(types.int64, 1, _trailing_zeros)
    count, up = _intrinsic(types.int64, 1, _count), _intrinsic(types.int64, 2, _up)
    top, insides = _intrinsic(types.int64, 1, _top), _intrinsic(types.int64, 2, _insides)

quotes, escapes, breaks = _mask_of(QUOTES), _mask_of(ESCAPES), _mask_of(BREAKS)
opens, closes, delimiters = _mask_of(OPENS), _mask_of(CLOSES), _mask_of(DELIMITERS)
string_stops, not_blanks = _mask_of(STRING_STOPS, HALF), _mask_of(NOT_BLANKS, HALF)
