"""Test the numbering of known and new words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm_kernels import string_tables as tables
from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import PADDING, address

WORDS = st.binary(max_size=tables.LONGEST) | st.text("ab", max_size=20).map(str.encode)


def padded(text):
    return np.frombuffer(text + bytes(PADDING), np.uint8).copy()


@kernel
def value_of(table, at, text, i, size):
    """Look up one word of a text."""
    last = (len(table) - at) // tables.SLOT - 1
    return tables.find(address(table), at, last, address(text), i, size)


@kernel
def code_of(strings, text, i, size):
    """Number one word of a text."""
    return tables.intern(address(strings.cells), address(strings.pool), address(text), i, size)


@kernel
def hashed(text, i, size):
    """The hash of one word of a text."""
    return tables.hash_of(address(text), i, size)


def intern_all(strings, texts):
    codes = []
    for text in texts:
        block = padded(b"?" + text)
        code = code_of(strings, block, 1, len(text))
        while tables.is_full(strings):
            assert code == -1
            strings = tables.grown(strings)
            code = code_of(strings, block, 1, len(text))
        codes.append(code)
    return strings, codes


@given(
    st.dictionaries(WORDS, st.integers(0, 1 << 40), max_size=30), st.lists(WORDS, max_size=9)
)
def test_find_knows_the_words_of_its_table_and_no_other(known, asked):
    table = tables.string_table(known)
    for at in (0, 5):
        moved = np.concatenate([np.zeros(at, np.int64), table])
        for word in [*known, *asked]:
            found = value_of(moved, at, padded(b"xyz" + word + b'"rest'), 3, len(word))
            assert found == known.get(word, -1)


def test_words_with_equal_prefixes_are_distinguished():
    known = {b"Process Group " + end: k for k, end in enumerate([b"Name", b"Desc", b"Rank"])}
    table = tables.string_table(known)
    for word, value in known.items():
        assert value_of(table, 0, padded(word), 0, len(word)) == value
    assert value_of(table, 0, padded(b"Process Group Nope"), 0, 18) == -1


def test_a_word_of_more_than_40_bytes_is_no_entry_of_a_table():
    with pytest.raises(ValueError, match="more than 40"):
        tables.string_table({b"x" * 41: 1})


@given(st.lists(st.binary(max_size=70), max_size=60))
def test_words_are_numbered_in_the_order_of_their_appearance(texts):
    strings, codes = intern_all(tables.no_strings(slots=4, pool=8), texts)
    order = list(dict.fromkeys(texts))
    assert tables.texts_of(strings) == order
    assert codes == [order.index(text) for text in texts]


def test_the_table_grows_with_more_words():
    texts = [b"%d" % (k % 3000) for k in range(6000)]
    strings, codes = intern_all(tables.no_strings(), texts)
    assert codes == [k % 3000 for k in range(6000)]
    assert len(tables.texts_of(strings)) == 3000


def test_the_pool_grows_for_a_large_word():
    long = b"y" * 1000
    strings, codes = intern_all(tables.no_strings(slots=8, pool=16), [b"x", long, b"x", long])
    assert codes == [0, 1, 0, 1]
    assert tables.texts_of(strings) == [b"x", long]


def test_words_with_equal_hashes_are_distinguished(monkeypatch):
    """As a word of one's own hash is in the way, so may any other's be."""
    strings, _ = intern_all(tables.no_strings(slots=8, pool=64), [b"first"])
    index = strings.cells
    slots = int(index[2])
    taken = next(k for k in range(slots, len(index), 2) if index[k + 1] == 0)
    # The next word's slot holds another word under the same hash.
    block = padded(b"second")
    key = hashed(block, 0, 6)
    index[taken : taken + 2] = -1
    index[slots + 2 * (key & 7) :][:2] = key, 0
    assert code_of(strings, block, 0, 6) == 1
    assert code_of(strings, block, 0, 6) == 1
    # A word of the same size and hash is compared byte by byte.
    strings, _ = intern_all(tables.no_strings(slots=8, pool=64), [b"first1234567890"])
    slots = int(strings.cells[2])
    for k in range(8):
        for word in (b"first1234567891", b"first0234567890"):
            key = hashed(padded(word), 0, 15)
            if k == key & 7 and strings.cells[slots + 2 * k + 1] < 0:
                strings.cells[slots + 2 * k :][:2] = key, 0
                assert code_of(strings, padded(word), 0, 15) > 0


@given(st.binary(min_size=1, max_size=80), st.integers(0, 79), st.integers(1, 255))
def test_a_hash_depends_on_every_byte(text, k, flip):
    other = bytearray(text)
    other[k % len(text)] ^= flip
    size = len(text)
    assert hashed(padded(text), 0, size) != hashed(padded(bytes(other)), 0, size)
    assert hashed(padded(b"ab" + text), 2, size) == hashed(padded(text), 0, size)


@kernel
def are_same(text, i, j, size):
    """Compare two words of a text."""
    return tables.same(address(text), i, address(text), j, size)


def test_words_of_one_size_differ_in_any_part():
    text = padded(b"abcdefghij" + b"abcdefghiX" + b"Xbcdefghij")
    assert [are_same(text, 0, place, 10) for place in (0, 10, 20)] == [True, False, False]
