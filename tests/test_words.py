"""Words, numbers and nesting in a text of bytes: the parts of the scanner."""

import json
import os
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import config

from fastcomm_kernels import _jit, _llvm, json_scan, words

LONG = st.integers(-(1 << 63), (1 << 63) - 1)
BYTES = st.binary(min_size=_llvm.STEP, max_size=_llvm.STEP)


def text_of(content):
    """The bytes with the padding that a kernel may look at."""
    return np.frombuffer(content + bytes(4 * _llvm.STEP), np.uint8)


@_jit.kernel
def ask(text, i):
    at = _llvm.address(text)
    return (
        (_llvm.byte(at, i), _llvm.load64(at, i), _llvm.quotes(at, i), _llvm.escapes(at, i)),
        (_llvm.breaks(at, i), _llvm.opens(at, i), _llvm.closes(at, i), _llvm.delimiters(at, i)),
        (_llvm.string_stops(at, i), _llvm.not_blanks(at, i)),
    )


@_jit.kernel
def compute(a, b, bit):
    return (_llvm.mix(a, b), _llvm.count(a), _llvm.up(a, bit), _llvm.top(a)), (
        _llvm.insides(a, bit),
        _llvm.trailing_zeros(a),
    )


@_jit.kernel
def write(column, text):
    _llvm.put(_llvm.address(column), 1, _llvm.get(_llvm.address(column), 0) + 1)
    _llvm.put_byte(_llvm.address(text), 2, 300)


def unsigned(tree):
    return [int(each) & ((1 << 64) - 1) for part in tree for each in part]


@given(BYTES, st.integers(0, 3))
def test_the_instructions_about_bytes_equal_their_twins(content, i):
    text = text_of(content + content)
    half, step = _llvm.HALF, _llvm.STEP
    masks = [
        (_llvm.QUOTES, step),
        (_llvm.ESCAPES, step),
        (_llvm.BREAKS, step),
        (_llvm.OPENS, step),
        (_llvm.CLOSES, step),
        (_llvm.DELIMITERS, step),
        (_llvm.STRING_STOPS, half),
        (_llvm.NOT_BLANKS, half),
    ]
    wanted = [_llvm.byte_twin(text, i), _llvm.load64_twin(text, i)]
    wanted += [_llvm.mask_twin(text, i, members, width) for members, width in masks]
    assert unsigned(ask(text, i)) == unsigned([wanted])
    for (members, width), mask in zip(masks, wanted[2:], strict=True):
        assert mask == sum(1 << k for k in range(width) if int(text[i + k]) in members)


@given(LONG, LONG, st.integers(0, 1))
def test_the_instructions_about_numbers_equal_their_twins(a, b, bit):
    a = a or 1
    word = a & ((1 << 64) - 1)
    wanted = [
        *(_llvm.mix_twin(a, b), _llvm.count_twin(word), _llvm.up_twin(word, bit)),
        *(_llvm.top_twin(word), _llvm.insides_twin(word, bit), _llvm.trailing_zeros_twin(word)),
    ]
    # Plain Python keeps masks unsigned; a compiled kernel sees the same bits signed.
    found = (
        compute(word, b, bit)
        if config.DISABLE_JIT
        else compute(np.int64(a), np.int64(b), np.int64(bit))
    )
    assert unsigned(found) == unsigned([wanted])


def test_what_is_written_is_where_it_belongs():
    column, text = np.array([41, 0]), np.zeros(4, np.uint8)
    if config.DISABLE_JIT:
        _llvm.put_twin(column, 1, _llvm.get_twin(column, 0) + 1)
        _llvm.put_byte_twin(text, 2, 300 & 255)
    else:
        write(column, text)
    assert column.tolist() == [41, 42]
    assert text.tolist() == [0, 0, 300 & 255, 0]


WORDS = st.lists(st.binary(max_size=40), max_size=60)


@given(WORDS)
def test_a_word_gets_the_code_of_its_first_appearance(met):
    text = text_of(b"".join(met))
    strings, codes, i = words.no_strings(slots=16, pool=256), [], 0
    for word in met:
        while (
            code := words.intern(
                words.strings_at(strings),
                _llvm.address_twin(text) if config.DISABLE_JIT else text.ctypes.data,
                i,
                len(word),
            )
        ) < 0:
            strings = words.grown(strings)
        codes.append(code)
        i += len(word)
    order = list(dict.fromkeys(met))
    assert codes == [order.index(word) for word in met]
    assert words.texts_of(strings) == order


KNOWN = st.dictionaries(
    st.binary(min_size=1, max_size=32), st.integers(0, 1 << 40), max_size=40
)


@given(KNOWN, st.lists(st.binary(max_size=40), max_size=10))
def test_a_table_knows_its_words_and_no_other(known, others):
    table = words.word_table(known)
    at = table if config.DISABLE_JIT else table.ctypes.data
    last = len(table) // words.SLOT - 1
    for word in [*known, *others]:
        text = text_of(word)
        place = text if config.DISABLE_JIT else text.ctypes.data
        assert words.find(at, last, place, 0, len(word)) == known.get(word, -1)


def read_decimal(content, scale):
    text = text_of(content.encode())
    at = text if config.DISABLE_JIT else text.ctypes.data
    return json_scan.decimal(at, 0, np.int64(scale))


def by_definition(content, scale):
    value = (Decimal(content) * 10**scale).to_integral_value(rounding=ROUND_HALF_UP)
    return int(value) if abs(value) <= (1 << 63) - 1 else json_scan.NULL


NUMBERS = st.one_of(
    st.integers(-(10**17), 10**17).map(str),
    st.decimals(-(10**13), 10**13, allow_nan=False, places=3).map("{:f}".format),
    st.decimals(-(10**6), 10**6, allow_nan=False, places=9).map("{:f}".format),
    st.floats(-1e12, 1e12, allow_nan=False).map(repr),
    st.tuples(st.integers(0, 10**8), st.integers(-30, 6)).map(lambda p: f"{p[0]}E{p[1]:+}"),
    st.tuples(st.integers(0, 99), st.integers(0, 10**6), st.integers(-9, 9)).map(
        lambda p: f"{p[0]}.{p[1]}e{p[2]}"
    ),
)


@given(NUMBERS, st.sampled_from([0, 3]))
def test_a_number_is_scaled_and_rounded_as_its_text_says(content, scale):
    value, end = read_decimal(content, scale)
    assert end == len(content)
    wanted = by_definition(content, scale)
    # Of an exponential more than 18 digits are not looked at.
    assert value == wanted or (abs(value - wanted) <= 1 and "e" in content.lower())


@pytest.mark.parametrize(
    ("content", "scale", "value"),
    [
        ("1712500000000000.123", 3, 1_712_500_000_000_000_123),
        ("0.0005", 3, 1),
        ("0.0004999", 3, 0),
        ("-0.0005", 3, -1),
        ("68.0", 0, 68),
        ("5e-05", 3, 0),
        ("0e999", 3, 0),
        ("-25e-1", 0, -3),
        ("1234567890123456789012e-10", 0, 123456789012),
        ("99999999999999999999", 0, json_scan.NULL),
        ("9999999999999999999", 3, json_scan.NULL),
        ("9223372036854775.999", 3, json_scan.NULL),
        ("1e999", 3, json_scan.NULL),
        ("x", 0, json_scan.NULL),
        ("", 0, json_scan.NULL),
    ],
)
def test_numbers_at_the_edges(content, scale, value):
    assert read_decimal(content, scale)[0] == value


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=30)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=9), inner, max_size=6)
    ),
    max_leaves=30,
)


@given(
    st.one_of(st.lists(JSON), st.dictionaries(st.text(), JSON)),
    st.sampled_from([None, 1]),
    st.integers(0, 70),
)
def test_a_nested_value_is_skipped_to_its_end(value, indent, before):
    content = json.dumps(value, indent=indent).encode()
    text = text_of(b" " * before + content + b', {"next": "one"}] ' + b" " * 80)
    at = text if config.DISABLE_JIT else text.ctypes.data
    wanted = before + len(content)
    assert json_scan.skip_to_depth(at, before, np.int64(0)) == wanted
    assert json_scan.skip_slowly(at, before, np.int64(0)) == wanted


@pytest.mark.parametrize(
    "content", [b'{"a": "x\n"}', b'{"a" "b"}', b'["a"b]', b'{"a": [1, 2', b'["a']
)
def test_a_nested_value_that_does_not_end_says_where(content):
    text = text_of(content)
    at = text if config.DISABLE_JIT else text.ctypes.data
    assert json_scan.skip_to_depth(at, 0, np.int64(0)) < 0


def test_without_a_folder_for_its_code_a_kernel_still_compiles(tmp_path):
    blocked = tmp_path / "cache"
    blocked.write_text("a file in the place of the folder")
    code = (
        "from fastcomm_kernels import _jit, intervals; import numpy as np;"
        "print(_jit.is_compiled(), intervals.union_length(np.array([1]), np.array([3])))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(blocked)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(bool(config.DISABLE_JIT)), "2"]


def test_the_mark_of_compiled_kernels_is_kept_with_their_code(tmp_path, monkeypatch):
    monkeypatch.setattr(_jit, "_FOLDER", tmp_path)
    monkeypatch.setattr(_jit._numba_settings, "DISABLE_JIT", 0)
    assert not _jit.is_compiled()
    _jit.mark_compiled()
    assert _jit.is_compiled()
    monkeypatch.setattr(_jit, "_FOLDER", None)
    _jit.mark_compiled()
    assert not _jit.is_compiled()


def test_no_folder_can_be_made_below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _jit._cache_folder() is None


def test_words_of_one_size_differ_in_any_part():
    text = text_of(b"abcdefghij" + b"abcdefghiX" + b"Xbcdefghij")
    at = text if config.DISABLE_JIT else text.ctypes.data
    assert [words.same(at, 0, at, place, 10) for place in (0, 10, 20)] == [True, False, False]


def test_a_known_word_is_known_by_all_its_bytes():
    table = words.word_table({b"Process Group Name": 1})
    text = text_of(b"Process Group Ranx")
    at, place = (table, text) if config.DISABLE_JIT else (table.ctypes.data, text.ctypes.data)
    assert words.find(at, len(table) // words.SLOT - 1, place, 0, 18) == -1


def test_a_hash_alone_proves_no_word():
    strings, text = words.no_strings(), text_of(b"abc")
    place = text if config.DISABLE_JIT else text.ctypes.data
    assert words.intern(words.strings_at(strings), place, 0, 3) == 0
    strings.pool[0] = ord("X")  # as if another word had the hash of this one
    assert words.intern(words.strings_at(strings), place, 0, 3) == 1
    assert words.texts_of(strings) == [b"Xbc", b"abc"]
