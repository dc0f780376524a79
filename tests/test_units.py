import pytest

from fastcomm.errors import ConfigError
from fastcomm.units import format_bandwidth, format_bytes, format_ns, parse_bandwidth


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
def test_bandwidths_in_words(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    "text", ["", "400", "400G", "fast", "-1GB/s", "0GB/s", "1..2GB/s", "1e999GB/s"]
)
def test_what_is_no_bandwidth_is_an_error(text):
    with pytest.raises(ConfigError, match="wanted a number and a unit"):
        parse_bandwidth(text)


def test_numbers_for_people():
    assert [format_ns(ns) for ns in (0, 999, 1500, -2.5e6, 3e9)] == [
        "0 ns",
        "999.00 ns",
        "1.50 us",
        "-2.50 ms",
        "3.00 s",
    ]
    assert [format_bytes(n) for n in (0, 12, 4096, 5e12)] == [
        "0 B",
        "12.00 B",
        "4.10 kB",
        "5.00 TB",
    ]
    assert format_bandwidth(50e9) == "50.00 GB/s"
