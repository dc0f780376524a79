from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import ConfigError
from fastcomm.show import pages
from fastcomm.units import (
    counted,
    enumeration,
    format_bandwidth,
    format_binary_bytes,
    format_bytes,
    format_ns,
    format_signed_ns,
    parse_bandwidth,
    percent,
    rounded,
    signed_percent,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400Gbit/s", 50e9),
        ("400 Gbps", 50e9),
        ("400gb/s", 50e9),
        ("50GB/s", 50e9),
        ("1e3 MB/s", 1e9),
        ("1GiB/s", 2**30),
        ("8 bit/s", 1),
        ("1.5TBps", 1.5e12),
    ],
)
def test_bandwidths_are_parsed_and_formatted(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    "text", ["", "400", "400G", "fast", "-1GB/s", "0GB/s", "1..2GB/s", "1e999GB/s"]
)
def test_invalid_bandwidths_are_errors(text):
    with pytest.raises(ConfigError, match="expected a number and a unit"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["1 bit/s", "0.5 B/s", "1e4 TB/s"])
def test_bandwidths_that_no_link_has_are_errors(text):
    with pytest.raises(ConfigError, match=r"expected .* bytes/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (29.65, 1, "29.7"),  # whose binary fraction is below it
        (0.125, 2, "0.13"),
        (2.5, 0, "3"),
        (-0.25, 1, "-0.3"),
        (-0.04, 1, "0.0"),
        (1e300, 1, f"1{300 * '0'}.0"),
        (float("nan"), 1, "nan"),
    ],
)
def test_halves_round_away_from_zero(value, decimals, text):
    assert rounded(value, decimals) == text


def test_halves_round_equally_in_all_units():
    assert [format_ns(ns) for ns in (29.65e6, 2.5, 1.005e6, 999.5e3)] == [
        "29.7 ms",
        "3 ns",
        "1.01 ms",
        "1.00 ms",
    ]
    assert format_bytes(29.65e6) == "29.7 MB"
    assert [percent(share) for share in (0.2965, 0.0005, 0.6605, -0.0004)] == [
        "29.7 %",
        "0.1 %",
        "66.1 %",
        "0.0 %",
    ]
    assert [signed_percent(change, 2) for change in (0.1, -0.00125, 0)] == [
        "+10.00 %",
        "-0.13 %",
        "+0.00 %",
    ]


@given(st.floats(-1e12, 1e12), st.integers(0, 6))
def test_a_rounded_number_is_the_nearest_with_so_many_decimals(value, decimals):
    exact, step = Fraction(repr(value)), Fraction(1, 10**decimals)
    found = Fraction(rounded(value, decimals))
    assert abs(found - exact) <= step / 2
    assert abs(found) >= abs(exact) or abs(found - exact) < step / 2


def test_numbers_are_formatted_for_readers():
    assert [format_ns(ns) for ns in (0, 999, 1500, -2.5e6, 3e9, -0.3)] == [
        "0 ns",
        "999 ns",
        "1.50 us",
        "-2.50 ms",
        "3.00 s",
        "0 ns",
    ]
    assert [format_bytes(n) for n in (0, 12, 4096, 5e12)] == [
        "0 B",
        "12 B",
        "4.10 kB",
        "5.00 TB",
    ]
    assert format_bandwidth(50e9) == "50.0 GB/s"
    assert format_binary_bytes(80 * 2**30) == "80.0 GiB"
    assert [format_signed_ns(ns) for ns in (0, 2e6, -2e6)] == ["+0 ns", "+2.00 ms", "-2.00 ms"]


def test_a_number_is_rounded_once_and_to_the_next_unit_where_it_reaches_it():
    assert [format_ns(ns) for ns in (17.951e6, 17.949e6, 999_600, 999_400, 999.6)] == [
        "18.0 ms",
        "17.9 ms",
        "1.00 ms",
        "999 us",
        "1.00 us",
    ]
    assert [format_ns(ns, 4) for ns in (18.8449e6, 999_960)] == ["18.84 ms", "1.000 ms"]
    assert [pages.ns(ns) for ns in (17.951e6, 999_600)] == ["18.0\u202fms", "1.00\u202fms"]


QUANTITIES = st.floats(-1e15, 1e15) | st.integers(-(10**6), 10**6).map(float)
FORMATS = {
    format_ns: {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9},
    format_bytes: {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    format_binary_bytes: {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}


def read(text, units):
    """The number that a text says, and half a unit of its last digit."""
    number, unit = text.replace("\u202f", " ").replace("\u2212", "-").split(" ")
    decimals = len(number.partition(".")[2])
    size = Fraction(units[unit.replace("\u00b5", "u")])
    return Fraction(number) * size, size / 10**decimals / 2


@pytest.mark.parametrize("form", FORMATS)
@given(value=QUANTITIES, digits=st.integers(3, 5))
def test_a_printed_number_is_right_to_its_last_digit(form, value, digits):
    said, half = read(form(value, digits), FORMATS[form])
    assert abs(said - Fraction(value)) <= half * (1 + Fraction(1, 10**9))


@pytest.mark.parametrize("form", FORMATS)
@given(values=st.lists(QUANTITIES, min_size=2, max_size=9), ulps=st.integers(-3, 3))
def test_a_larger_number_is_not_printed_as_a_smaller_one(form, values, ulps):
    near = [value * (1 + ulps / 1000) for value in values]
    said = [read(form(value), FORMATS[form])[0] for value in sorted([*values, *near])]
    assert said == sorted(said)


@given(QUANTITIES)
def test_the_page_prints_what_the_terminal_prints(value):
    assert read(pages.ns(value), FORMATS[format_ns]) == read(
        format_ns(value), FORMATS[format_ns]
    )


def test_nouns_agree_with_their_count():
    assert [counted(n, "iteration") for n in (0, 1, 2)] == [
        "0 iterations",
        "1 iteration",
        "2 iterations",
    ]
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert pages.many(1, "rank") == "1 rank"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["TP"], "TP"),
        (["DP", "TP"], "DP and TP"),
        (["DP", "PP", "TP"], "DP, PP and TP"),
    ],
)
def test_names_are_listed_as_in_a_sentence(names, text):
    assert enumeration(names) == text
