"""Machine instructions that Python cannot express, each with a Python twin.

With the JIT on, kernels compile these to one to ten instructions; with `NUMBA_DISABLE_JIT=1`
the twin runs. A test checks that both are equal. Twins return Python integers, so that a hash
that wraps at 64 bits raises no overflow warning of NumPy.

An *address* is the memory address of an array's data; for twins it is the array itself.
Functions that pass addresses avoid reference counting, which would make a scanner ten times
slower. Callers keep the array alive while its address is in use.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

import fastcomm_kernels._numba  # noqa: F401 - before numba itself

# isort: split
from numba import types
from numba.core import config
from numba.extending import intrinsic

Text = NDArray[np.uint8]
Address = NDArray[Any]

# Bytes that one test looks at; tests for nearby bytes look at half as many.
STEP = 64
HALF = STEP // 2
# Readable bytes that a text needs behind its end, where a test may begin.
PADDING = 2 * STEP

_WORD = (1 << 64) - 1
_MULTIPLIER = 0xFF51AFD7ED558CCD  # of MurmurHash3's last step
_DIGITS = frozenset(b"0123456789")
_setting: Any = config


def address_twin(array: NDArray[Any]) -> Address:
    """Return the address of the data of a contiguous array of any shape.

    The twin returns a flat view: index i of it is the i-th item behind the address.
    """
    return array.reshape(-1)


def byte_twin(text: Address, i: int) -> int:
    """Return byte `i` of a text, 0 to 255."""
    return int(text[i])


def put_byte_twin(text: Address, i: int, value: int) -> None:
    """Write `value`, 0 to 255, to byte `i` of a text."""
    text[i] = value


def get_twin(column: Address, i: int) -> int:
    """Return the 64-bit integer in cell `i` of a column (8 bytes a cell)."""
    return int(column[i])


def put_twin(column: Address, i: int, value: int) -> None:
    """Write the 64-bit integer `value` to cell `i` of a column (8 bytes a cell)."""
    column[i] = value


def put8_twin(column: Address, i: int, value: int) -> None:
    """Write the 64-bit integer `value` to each of the cells `i` to `i` + 7 of a column."""
    column[i : i + 8] = value


def load64_twin(text: Address, i: int) -> int:
    """Return the eight bytes from `i` on as a signed integer, the first byte lowest."""
    return int.from_bytes(text[i : i + 8].tobytes(), "little", signed=True)


def mix_twin(state: int, word: int) -> int:
    """Return the next state of a multiplicative hash over 64-bit words, signed."""
    product = ((int(state) ^ int(word)) * _MULTIPLIER) & _WORD
    mixed = product ^ (product >> 32)
    return mixed - (mixed >> 63 << 64)


def digit_count_twin(word: int) -> int:
    """Return how many of the first bytes of a word are decimal digits, 0 to 8."""
    parts = (word & _WORD).to_bytes(8, "little")
    return next((k for k, part in enumerate(parts) if part not in _DIGITS), 8)


def digits_twin(word: int, size: int) -> int:
    """Return the number that the first `size` bytes of a word spell, all decimal digits."""
    return int(b"0" + (word & _WORD).to_bytes(8, "little")[:size])


def trailing_zeros_twin(mask: int) -> int:
    """Return the number of zero bits below the lowest set bit of a mask that has one."""
    return (int(mask) & -int(mask)).bit_length() - 1


def bit_length_twin(number: int) -> int:
    """Return the number of bits of a number that is not negative; 0 for 0."""
    return int(number).bit_length()


def count_twin(mask: int) -> int:
    """Return the number of set bits of a mask."""
    return int(mask).bit_count()


def up_twin(mask: int, carry: int) -> int:
    """Return a 64-bit mask shifted up by one bit, with `carry` (0 or 1) as the lowest bit."""
    return (mask << 1 | carry) & _WORD


def top_twin(mask: int) -> int:
    """Return the highest bit of a 64-bit mask, 0 or 1."""
    return mask >> 63 & 1


def insides_twin(quotes: int, carry: int) -> int:
    """Return the bits from each opening quote to before its closing one, as a 64-bit mask.

    Bits of `quotes` are the quotes. `carry` is 1 if a string is open at the first bit.
    """
    mask, inside = 0, carry
    for k in range(STEP):
        inside ^= quotes >> k & 1
        mask |= inside << k
    return mask


def mask_twin(text: Address, i: int, members: NDArray[np.bool_], width: int) -> int:
    """Return which of the `width` bytes from `i` on are `members`, as an unsigned integer.

    Bit b stands for byte `i` + b. `members` has 256 Booleans, one per value of a byte.
    """
    bits = np.packbits(members[text[i : i + width]], bitorder="little")
    return int.from_bytes(bits.tobytes(), "little")


# Sets of bytes that a scan searches.
BLANKS = frozenset(range(1, 33))
QUOTES = frozenset(b'"')
ESCAPES = frozenset(b"\\")
OPENS = frozenset(b"{[")
CLOSES = frozenset(b"}]")
CONTROLS = frozenset(range(32))
GAPS = BLANKS | frozenset(b",:")
STRING_STOPS = QUOTES | ESCAPES | CONTROLS
NOT_BLANKS = frozenset(range(256)) - BLANKS
SCALAR_ENDS = OPENS | CLOSES | QUOTES | GAPS | {0}


_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _whole(number: int) -> Any:
    return ir.Constant(_I64, number)


def _load(builder: Any, address: Any, i: Any, type_: Any, size: int) -> Any:
    """Emit a load of cell `i` from `address`; cells have `size` bytes and that alignment."""
    place = builder.add(address, builder.mul(i, _whole(size)))
    loaded = builder.load(builder.inttoptr(place, type_.as_pointer()))
    loaded.align = size
    return loaded


def _store(builder: Any, args: Any, type_: Any, size: int) -> None:
    place = builder.add(args[0], builder.mul(args[1], _whole(size)))
    value = args[2] if type_ is _I64 else builder.trunc(args[2], type_)
    builder.store(value, builder.inttoptr(place, type_.as_pointer())).align = size


def _intrinsic(result_type: Any, arguments: int, code: Callable[[Any, Any], Any]) -> Any:
    """Return an intrinsic of 64-bit arguments; `code` takes the builder and the values."""
    argument_types = [types.int64] * arguments

    @intrinsic
    def one(typing: Any, a: Any) -> Any:
        return result_type(*argument_types), lambda _context, builder, _signature, args: code(
            builder, args
        )

    @intrinsic
    def two(typing: Any, a: Any, b: Any) -> Any:
        return result_type(*argument_types), lambda _context, builder, _signature, args: code(
            builder, args
        )

    @intrinsic
    def three(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return result_type(*argument_types), lambda _context, builder, _signature, args: code(
            builder, args
        )

    return (one, two, three)[arguments - 1]


def _ranges(members: frozenset[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of adjacent bytes in a set."""
    firsts = [byte for byte in sorted(members) if byte - 1 not in members]
    lasts = [byte for byte in sorted(members) if byte + 1 not in members]
    return list(zip(firsts, lasts, strict=True))


def _mask(members: frozenset[int], width: int) -> Any:
    """Return an intrinsic that tests `width` bytes at once and returns the results as bits."""
    vector = ir.VectorType(_I8, width)
    # Square and curly brackets differ in one bit: set it, and one test finds both.
    fold = all(byte ^ 32 in members for byte in members)
    folded = frozenset(byte | 32 for byte in members) if fold else members

    def splat(byte: int) -> Any:
        return ir.Constant(vector, [byte] * width)

    def code(builder: Any, args: Any) -> Any:
        block = _load(builder, args[0], args[1], vector, 1)
        block = builder.or_(block, splat(32)) if fold else block
        matches = ir.Constant(ir.VectorType(ir.IntType(1), width), [0] * width)
        for first, last in _ranges(folded):
            # An unsigned difference wraps, so that one comparison tests a range.
            moved = builder.sub(block, splat(first))
            in_range = builder.icmp_unsigned("<=", moved, splat(last - first))
            matches = builder.or_(matches, in_range)
        bits = builder.bitcast(matches, ir.IntType(width))
        return bits if width == STEP else builder.zext(bits, _I64)

    return _intrinsic(types.int64, 2, code)


@intrinsic
def _address(typing: Any, array: Any) -> Any:
    """Return the address of the first cell of an array, as an integer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(struct.data, _I64)

    return types.int64(array), code


def _byte(builder: Any, args: Any) -> Any:
    return builder.zext(_load(builder, args[0], args[1], _I8, 1), _I64)


def _put_byte(builder: Any, args: Any) -> Any:
    _store(builder, args, _I8, 1)


def _get(builder: Any, args: Any) -> Any:
    return _load(builder, args[0], args[1], _I64, 8)


def _put(builder: Any, args: Any) -> Any:
    _store(builder, args, _I64, 8)


def _put8(builder: Any, args: Any) -> Any:
    """Emit `put8`: write args[2] to eight cells of address args[0] from args[1] on."""
    one = ir.Constant(ir.VectorType(_I64, 1), [0])
    one = builder.insert_element(one, args[2], _whole(0))
    eight = ir.VectorType(_I64, 8)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    place = builder.add(args[0], builder.mul(args[1], _whole(8)))
    stored = builder.store(
        builder.shuffle_vector(one, one, zeros), builder.inttoptr(place, eight.as_pointer())
    )
    stored.align = 8


def _load64(builder: Any, args: Any) -> Any:
    return _load(builder, args[0], args[1], _I64, 1)


def _zeros_below(builder: Any, mask: Any, *, if_none: bool) -> Any:
    kind = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
    count = builder.module.declare_intrinsic("llvm.cttz", [_I64], kind)
    return builder.call(count, [mask, ir.Constant(ir.IntType(1), not if_none)])


def _trailing_zeros(builder: Any, args: Any) -> Any:
    return _zeros_below(builder, args[0], if_none=False)


def _bit_length(builder: Any, args: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
    count = builder.module.declare_intrinsic("llvm.ctlz", [_I64], kind)
    zeros = builder.call(count, [args[0], ir.Constant(ir.IntType(1), 0)])
    return builder.sub(_whole(64), zeros)


def _count(builder: Any, args: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64])
    return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [_I64], kind), args)


def _up(builder: Any, args: Any) -> Any:
    return builder.or_(builder.shl(args[0], _whole(1)), args[1])


def _top(builder: Any, args: Any) -> Any:
    return builder.lshr(args[0], _whole(63))


def _insides(builder: Any, args: Any) -> Any:
    """Emit `insides`: bits from each opening quote to before its closing one."""
    mask = args[0]
    for shift in (1, 2, 4, 8, 16, 32):
        mask = builder.xor(mask, builder.shl(mask, _whole(shift)))
    return builder.xor(mask, builder.sub(_whole(0), args[1]))


def _mix(builder: Any, args: Any) -> Any:
    mixed = builder.mul(builder.xor(*args), _whole(_MULTIPLIER))
    return builder.xor(mixed, builder.lshr(mixed, _whole(32)))


def _eight_times(byte: int) -> Any:
    return _whole(int.from_bytes(bytes([byte] * 8), "little"))


def _digit_count(builder: Any, args: Any) -> Any:
    """Emit `digit_count`: how many of the first bytes of a word are decimal digits."""
    digits = builder.xor(args[0], _eight_times(ord("0")))
    # Sets the top bit of bytes above 9; top bits are masked in the sum, so that none carries.
    above = builder.add(builder.and_(digits, _eight_times(0x7F)), _eight_times(0x7F - 9))
    above = builder.and_(builder.or_(above, digits), _eight_times(0x80))
    return builder.lshr(_zeros_below(builder, above, if_none=True), _whole(3))


def _digits(builder: Any, args: Any) -> Any:
    """Emit `digits`: the number that the first `size` bytes of a word spell."""
    word, size = args
    # Two shifts, because a shift by 64 bits is undefined.
    half = builder.sub(_whole(32), builder.shl(size, _whole(2)))
    word = builder.shl(builder.shl(word, half), half)
    word = builder.and_(word, _eight_times(0x0F))
    for width, below in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0xFFFFFFFF)):
        # Two adjacent numbers become one: ten (a hundred, ten thousand) times the first plus
        # the second.
        pairs = builder.mul(word, _whole(10 ** (width // 8) << width | 1))
        word = builder.and_(builder.lshr(pairs, _whole(width)), _whole(below))
    return word


def _mask_of(members: frozenset[int], width: int = STEP) -> Any:
    """Return the function that marks bytes of a set among `width` bytes, one bit per byte."""
    if _setting.DISABLE_JIT:
        table = np.isin(np.arange(256), list(members))
        return partial(mask_twin, members=table, width=width)
    return _mask(members, width)


address: Any
if _setting.DISABLE_JIT:
    address, byte, put_byte = address_twin, byte_twin, put_byte_twin
    get, put, put8 = get_twin, put_twin, put8_twin
    load64, mix, trailing_zeros = load64_twin, mix_twin, trailing_zeros_twin
    bit_length = bit_length_twin
    digit_count, digits = digit_count_twin, digits_twin
    count, up, top, insides = count_twin, up_twin, top_twin, insides_twin
else:
    address = _address
    byte, put_byte = _intrinsic(types.int64, 2, _byte), _intrinsic(types.void, 3, _put_byte)
    get, put = _intrinsic(types.int64, 2, _get), _intrinsic(types.void, 3, _put)
    put8 = _intrinsic(types.void, 3, _put8)
    load64, mix = _intrinsic(types.int64, 2, _load64), _intrinsic(types.int64, 2, _mix)
    trailing_zeros = _intrinsic(types.int64, 1, _trailing_zeros)
    bit_length = _intrinsic(types.int64, 1, _bit_length)
    digit_count = _intrinsic(types.int64, 1, _digit_count)
    digits = _intrinsic(types.int64, 2, _digits)
    count, up = _intrinsic(types.int64, 1, _count), _intrinsic(types.int64, 2, _up)
    top, insides = _intrinsic(types.int64, 1, _top), _intrinsic(types.int64, 2, _insides)

quotes, escapes, controls = _mask_of(QUOTES), _mask_of(ESCAPES), _mask_of(CONTROLS)
opens, closes, gaps = _mask_of(OPENS), _mask_of(CLOSES), _mask_of(GAPS)
string_stops, not_blanks = _mask_of(STRING_STOPS, HALF), _mask_of(NOT_BLANKS, HALF)
scalar_ends = _mask_of(SCALAR_ENDS, HALF)
