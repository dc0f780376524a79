"""Test the parsers of numbers, strings and values against definitions."""

import json
from decimal import ROUND_HALF_UP, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fastcomm_kernels import json_events, json_text
from fastcomm_kernels import json_text as fastcomm_kernels_json_text
from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import PADDING, address

NULL = json_events.NULL
BLANKS = bytes(range(1, 33))


def padded(text):
    return np.frombuffer(text + bytes(PADDING), np.uint8).copy()


@kernel
def decimal_of(text, i, scale, to):
    """A number."""
    return fastcomm_kernels_json_text.decimal(address(text), i, scale, address(to), 0)


@kernel
def integer_of(text, i, to):
    """A whole number, or what stands in its place."""
    return json_events.integer(address(text), i, address(to), 0)


@kernel
def end_of_string(text, i):
    """Where a string ends."""
    return json_text.string_end(address(text), i)


@kernel
def end_of_blanks(text, i):
    """Where blanks end."""
    return json_text.skip_blanks(address(text), i)


@kernel
def end_of_value(text, i):
    """Where a value ends."""
    return json_text.skip_value(address(text), i)


@kernel
def end_with_care(text, i):
    """Where an object or list ends."""
    return json_text.skip_with_care(address(text), i)


# ------------------------------------------------------------------------------ numbers


def rounded(text, scale):
    """By definition: the number times 10^scale, half away from zero; NULL beyond 64 bits."""
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 3000, 10**9, -(10**9)
        number = Decimal(text)
        if not number or number.adjusted() + scale > 40:
            return NULL if number else 0
        if number.adjusted() + scale < -5:
            return 0
        value = int(number.scaleb(scale).to_integral_value(ROUND_HALF_UP))
    return value if abs(value) < 1 << 63 else NULL


def read_decimal(text, scale):
    to = np.array([7], np.int64)
    end = decimal_of(padded(b"??" + text.encode() + b", 12345678"), 2, np.int64(scale), to)
    assert end == 2 + len(text)
    return int(to[0])


DIGITS = st.text("0123456789", min_size=1, max_size=25)
NUMBERS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "-"]),
        DIGITS | st.just("0") | st.sampled_from(["9223372036854775", "9223372036854775807"]),
        st.just("")
        | DIGITS.map(".{}".format)
        | st.sampled_from([".5", ".4999", ".807", ".8075"]),
        st.just("")
        | st.builds(
            "{}{}{}".format,
            st.sampled_from("eE"),
            st.sampled_from(["", "+", "-"]),
            st.integers(0, 400),
        ),
    ),
)


@given(NUMBERS, st.sampled_from([0, 3]))
@example("4458676983543.183", 3)
@example("1712000000000123.456", 3)
@example("9223372036854775.807", 3)
@example("9223372036854775.8075", 3)
@example("-9223372036854775.8074", 3)
@example("9223372036854775.8", 0)
@example("9223372036854775807", 0)
@example("9223372036854775807.5", 0)
@example("9223372036854775808", 0)
@example("999999999999999999", 0)
@example("9999999999999999", 3)
@example("1e-05", 3)
@example("5e-4", 3)
@example("68.0", 3)
@example("0.0005", 3)
@example("0.00049999999999999999999", 3)
@example("00000000000000000000000012.5", 0)
@example("1E400", 3)
@example("0e400", 3)
@example("0." + "0" * 300 + "5e300", 0)
def test_a_number_is_read_without_a_float(text, scale):
    assert read_decimal(text, scale) == rounded(text, scale)


def test_an_exponent_may_be_of_any_size():
    assert read_decimal("1e99999999999999999999", 0) == NULL
    assert read_decimal("1e-99999999999999999999", 0) == 0


@pytest.mark.parametrize("text", ["", "-", "x", ".5", "nan", "true"])
def test_values_that_are_not_numbers_are_null(text):
    to = np.array([7], np.int64)
    end = decimal_of(padded(text.encode() + b","), 0, np.int64(3), to)
    assert (end, to[0]) == (int(text.startswith("-")), NULL)


def read_integer(text):
    to = np.array([7], np.int64)
    end = integer_of(padded(text + b', "next": 1}'), 0, to)
    assert end == len(text)
    return int(to[0])


@given(st.integers(-(1 << 66), 1 << 66), st.sampled_from(["{}", '"{}"', "{}.0", "{}.25"]))
def test_an_integer_may_be_in_quotes(number, form):
    expected = number if abs(number) < 1 << 63 else NULL
    assert read_integer(form.format(number).encode()) == expected


@pytest.mark.parametrize(
    "text",
    [b"null", b"true", b'"12 "', b'""', b'"x"', b"[1, 2]", b'{"a": 1}', b"", b"-", b"nan"],
)
def test_other_values_are_not_integers(text):
    assert read_integer(text) == NULL


# ------------------------------------------------------------------------------ strings


def slow_string_end(text, i):
    while True:
        if text[i] in b"\n\r\0":
            return ~i
        if text[i] == ord('"'):
            return i
        i += 2 if text[i] == ord("\\") else 1


@given(
    st.binary(max_size=8),
    st.lists(
        st.sampled_from(
            [b"a", b"b c", b"\\n", b'\\"', b"\\\\", b"\t", b"\x01", b"\xff", b"{", b"x" * 30]
        ),
        max_size=12,
    ),
    st.sampled_from([b'"', b"\n", b"\r", b"\0", b"", b"\\"]),
)
def test_a_string_ends_at_its_quote_or_breaks_at_a_line(before, parts, end):
    block = padded(before + b"".join(parts) + end)
    assert end_of_string(block, len(before)) == slow_string_end(block, len(before))


@given(
    st.binary(max_size=8),
    st.text("\x01\t\n\r \x1f", max_size=80),
    st.sampled_from(b'x"{\0\xff!'),
)
def test_blanks_end_at_the_first_other_byte(before, blanks, stop):
    block = padded(before + blanks.encode() + bytes([stop]))
    assert end_of_blanks(block, len(before)) == len(before) + len(blanks)


# ------------------------------------------------------------------------------ values

TEXT = st.text(st.sampled_from('ab ,:{}[]"\\/\n\té€𝄞\ud800'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=25,
)
STYLES = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"indent": 1}, {"indent": 4}, {"ensure_ascii": False}]
)


@given(VALUES, STYLES, st.integers(0, 70), st.sampled_from([b", ", b"}", b"]", b"\n]", b"  ,"]))
def test_any_value_is_skipped_at_any_place(value, style, at, behind):
    text = json.dumps(value, **style).encode(errors="surrogatepass")
    block = padded(b" " * at + text + behind + b'"x": 1}')
    assert end_of_value(block, at) == at + len(text)
    if text[:1] in b"{[":
        assert end_with_care(block, at) == at + len(text)


@given(VALUES, STYLES, st.integers(0, 70))
def test_an_incomplete_value_has_no_end(value, style, at):
    text = json.dumps(value, **style).encode(errors="surrogatepass")
    assume(text[:1] in (b"{", b"[", b'"'))
    for size in range(1, len(text)):
        n = at + size
        block = padded(b" " * at + text[:size])
        assert ~end_of_value(block, at) >= n
        if text[:1] != b'"':
            assert ~end_with_care(block, at) >= n


@pytest.mark.parametrize(
    "text",
    [
        b'{"a" 1}',
        b'{"a": 1 "b": 2}',
        b'{"a": 1, {"b": 2}}',
        b'{"a": [1, 2}',
        b'{"a": {"b": 2]}',
        b"{1: 2}",
        b'{"a": "b"c"}',
        b'{"a": "b\n"}',
        b"[1 2]",
        b'["a" "b"]',
        b"[" * 61 + b"]" * 61,
    ],
)
def test_the_careful_scan_finds_misplaced_text(text):
    assert 0 <= ~end_with_care(padded(text + b"   "), 0) < len(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": , "b": }',
        b"[nan, -inf, , ]",
        b"[" + b"7" * 90 + b"]",
        b'{"a":\x01nan}',
        b"{}",
        b"[ ]",
        b"[" * 60 + b"]" * 60,
    ],
)
def test_the_careful_scan_accepts_what_profilers_write(text):
    assert end_with_care(padded(text), 0) == len(text)


def test_a_bare_quote_is_found_where_many_bytes_are_looked_at_at_once():
    for gap in range(70):
        text = b'{"x": "' + b"y" * gap + b'"z", "a": 1, "b": "' + b"w" * 90 + b'"}' + b" " * 90
        assert 0 <= ~end_of_value(padded(text), 0) < len(text)


def test_an_unclosed_object_does_not_swallow_the_following_text():
    rows = b", ".join([b'{"a": [1, "x,]}"]}'] * 2000)
    whole = b"[" + rows + b"]"
    assert end_of_value(padded(whole), 0) == len(whole)
    # An object that is not closed does not swallow all that comes behind.
    torn = b'{"a": 1, ' + rows
    assert ~end_of_value(padded(torn), 0) == torn.index(b'{"a": [')
