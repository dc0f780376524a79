"""Test machine instructions in kernels against their Python equivalents."""

import numpy as np
from builders.examples import fewer
from hypothesis import example, given
from hypothesis import strategies as st
from numba.core import config

from fastcomm_kernels import _llvm
from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    HALF,
    PADDING,
    STEP,
    address,
    bit_length,
    byte,
    closes,
    controls,
    count,
    digit_count,
    digits,
    escapes,
    gaps,
    get,
    insides,
    load64,
    mix,
    not_blanks,
    opens,
    put,
    put8,
    put_byte,
    quotes,
    scalar_ends,
    string_stops,
    top,
    trailing_zeros,
    up,
)

WORDS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.binary(max_size=STEP)
SETS = [
    (_llvm.QUOTES, STEP),
    (_llvm.ESCAPES, STEP),
    (_llvm.CONTROLS, STEP),
    (_llvm.OPENS, STEP),
    (_llvm.CLOSES, STEP),
    (_llvm.GAPS, STEP),
    (_llvm.STRING_STOPS, HALF),
    (_llvm.NOT_BLANKS, HALF),
    (_llvm.SCALAR_ENDS, HALF),
]


def unsigned(word):
    return int(word) & (1 << 64) - 1


def padded(text):
    return np.frombuffer(text + bytes(PADDING), np.uint8).copy()


@kernel
def masks(text, i):
    """All tests of the bytes from `i` on."""
    at = address(text)
    return (
        quotes(at, i),
        escapes(at, i),
        controls(at, i),
        opens(at, i),
        closes(at, i),
        gaps(at, i),
        string_stops(at, i),
        not_blanks(at, i),
        scalar_ends(at, i),
    )


@kernel
def words_of(a, b):
    """All functions of two words."""
    return up(a, b & 1), top(a), insides(a, b & 1), mix(a, b), digit_count(a), count(a)


@kernel
def bits(number):
    """The number of bits of a number."""
    return bit_length(number)


@kernel
def lowest(mask):
    """The lowest set bit."""
    return trailing_zeros(mask)


@kernel
def number(word, size):
    """What eight bytes spell."""
    return digits(word, size)


@kernel
def moved(text, column, i, value):
    """Write and read both kinds of memory."""
    at, cells = address(text), address(column)
    put_byte(at, i, value)
    put(cells, i, value)
    put8(cells, i + 1, value)
    return byte(at, i), get(cells, i), load64(at, i)


@given(TEXTS, st.integers(0, STEP))
@example(bytes(range(STEP)), 0)
@example(bytes(range(192, 256)), 0)
@example(bytes(range(64, 128)), 0)
def test_a_mask_marks_the_bytes_of_a_set(text, i):
    block = padded(text)
    for mask, (members, width) in zip(masks(block, i), SETS, strict=True):
        expected = sum((int(c) in members) << k for k, c in enumerate(block[i : i + width]))
        assert unsigned(mask) == expected


def test_every_byte_is_tested_for_every_set():
    block = padded(bytes(range(256)))
    for i in range(0, 256, HALF):
        for mask, (members, width) in zip(masks(block, i), SETS, strict=True):
            expected = {k for k in range(i, i + width) if k < 256 and k in members}
            assert {i + k for k in range(width) if unsigned(mask) >> k & 1} >= expected
            assert unsigned(mask).bit_count() == len(expected) + (
                (0 in members) * max(0, i + width - 256)
            )


@given(WORDS, WORDS)
@example(-1, 1)
@example(0, 0)
def test_word_instructions_agree_with_their_python_equivalents(a, b):
    twins = (
        _llvm.up_twin(a, b & 1),
        _llvm.top_twin(a),
        _llvm.insides_twin(a, b & 1),
        _llvm.mix_twin(a, b),
        _llvm.digit_count_twin(a),
        _llvm.count_twin(unsigned(a)),
    )
    found = words_of(a, b) if not config.DISABLE_JIT else words_of(unsigned(a), b)
    assert list(map(unsigned, found)) == list(map(unsigned, twins))


@given(st.integers(0, (1 << 63) - 1))
def test_bit_length_is_pythons(number):
    assert bits(number) == _llvm.bit_length_twin(number) == number.bit_length()


@given(st.integers(1, (1 << 64) - 1))
def test_trailing_zeros_is_the_lowest_bit(mask):
    signed = mask - (mask >> 63 << 64)
    expected = next(k for k in range(64) if mask >> k & 1)
    assert lowest(signed) == _llvm.trailing_zeros_twin(signed) == expected


@given(st.integers(0, 8), st.data())
def test_digits_spell_their_number(size, data):
    text = data.draw(st.text("0123456789", min_size=size, max_size=size)).encode()
    text += data.draw(st.binary(min_size=8 - size, max_size=8 - size))
    word = int.from_bytes(text, "little", signed=True)
    assert number(word, size) == _llvm.digits_twin(word, size) == int(b"0" + text[:size])


@given(st.text("0123456789/:.-\0\xff", max_size=8))
def test_digits_end_at_the_first_other_byte(text):
    raw = text.encode("latin-1").ljust(8, b"x")
    found, _ = words_of(int.from_bytes(raw, "little", signed=True), 0)[4:]
    assert found == len(raw) - len(raw.lstrip(b"0123456789"))


@given(st.integers(0, 20), st.integers(0, 255), TEXTS)
def test_memory_is_written_and_read(i, value, text):
    block, column = padded(text), np.arange(40)
    expected_block, expected = block.copy(), column.copy()
    expected_block[i] = expected[i] = value
    expected[i + 1 : i + 9] = value
    word = int.from_bytes(expected_block[i : i + 8].tobytes(), "little", signed=True)
    assert moved(block, column, i, value) == (value, value, word)
    assert (block == expected_block).all()
    assert (column == expected).all()
    assert _llvm.load64_twin(expected_block, i) == word


@fewer(2)
@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1))
def test_string_masks_cover_opening_to_closing_quotes(marks, carry):
    inside, expected = bool(carry), 0
    for k in range(STEP):
        inside ^= bool(marks >> k & 1)
        expected |= inside << k
    assert _llvm.insides_twin(marks, carry) == expected
