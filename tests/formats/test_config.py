"""Test the configuration file: reading, errors and precedence."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import ConfigError
from fastcomm.formats.communication import Pattern
from fastcomm.formats.config import Config, read
from fastcomm.trace.rank_grid import Parallel
from fastcomm.trace.tags import TagRule

FULL = r"""
[parallel]
tp = 2
pp = 2
dp = 4
ep = 2
cp = 1
etp = 1
dp_replicate = 2
order = "tp-cp-ep-dp-pp"
framework = "megatron"

[[tags]]
description = "my_expert_*"
tag = "EP"

[[tags]]
ranks = [0, 4, 8]
tag = "DP"

[[tags]]
communicator = "0x8000000000000001"
tag = "TP"

[[tags]]
stream = 20
tag = "PP"

[[kernels]]
pattern = "my_all_reduce_\\d+"
op = "AllReduce"
tag = "TP"
library = "mine"

[[kernels]]
pattern = "^other"
op = "OTHER"

[iterations]
regex = "^train step (\\d+)$"

[link]
bandwidth = "400Gbit/s"
scale_up = "450GB/s"
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_full_file_is_read(written):
    config = read(written(FULL))
    assert config.parallel == Parallel(
        tp=2, pp=2, dp=4, ep=2, cp=1, etp=1, dp_replicate=2, order="tp-cp-ep-dp-pp",
        framework="megatron",
    )  # fmt: skip
    assert config.tags == (
        TagRule(field="description", value="my_expert_*", tag="EP"),
        TagRule(field="ranks", value=(0, 4, 8), tag="DP"),
        TagRule(field="communicator", value=2**63 + 1, tag="TP"),
        TagRule(field="stream", value=20, tag="PP"),
    )
    assert config.kernels == (
        Pattern(regex=r"my_all_reduce_\d+", op="AllReduce", tag="TP", library="mine"),
        Pattern(regex="^other", op="OTHER", library="user"),
    )
    assert config.iterations == r"^train step (\d+)$"
    assert (config.bandwidth, config.scale_out, config.scale_up) == (50e9, None, 450e9)


def test_an_empty_file_sets_nothing(written):
    config = read(written(""))
    assert config == Config()
    assert config.tag_rules(8).grid is None


def test_the_grid_is_made_once_the_world_is_known(written):
    config = read(written("[parallel]\ntp = 2\nframework = 'megatron-tp-pp-dp'\npp = 2"))
    rules = replace(config, guess_tags=True).tag_rules(16)
    assert rules.guess
    assert rules.grid is not None
    assert (rules.grid.dp, rules.grid.order) == (4, "tp-cp-ep-pp-dp")
    with pytest.raises(ConfigError, match="neither dp nor the world size is known"):
        Parallel(tp=2).grid(None)
    with pytest.raises(ConfigError, match="does not divide the world size"):
        Parallel(tp=3).grid(16)
    assert Parallel(framework="deepspeed").grid(16) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[paralel]", r"job.toml: unknown key 'paralel': expected one of .*mean 'parallel'\?"),
        ("[parallel]\ntpp = 2", r"\[parallel\]: unknown key 'tpp'.*did you mean 'tp'\?"),
        ("[parallel]\ntp = '2'", r"\[parallel\]: invalid tp '2': expected a whole number"),
        ("[parallel]\ntp = 0", "invalid tp 0: expected"),
        ("[parallel]\ntp = true", "invalid tp True: expected"),
        ("[parallel]\ntp = 2.0", "invalid tp 2.0: expected"),
        ("[parallel]\ntp = 99999999999999", "invalid tp 99999999999999: expected"),
        ("[parallel]\norder = 3", "invalid order 3: expected text"),
        ("[parallel]\norder = 'tp-qp'", r"\[parallel\] order 'tp-qp': unknown dimension 'qp'"),
        (
            "[parallel]\nframework = 'megatrn'",
            "invalid framework 'megatrn': expected one of.*mean 'megatron'",
        ),
        ("[parallel]\nframework = []", "invalid framework \\[\\]: expected one of"),
        ("parallel = 3", r"invalid parallel 3: expected a table \[parallel\]"),
        ("[tags]\ntag = 'DP'", r"invalid tags .*: expected tables \[\[tags\]\]"),
        ("tags = [3]", r"expected tables \[\[tags\]\]"),
        ("[[tags]]\nname = 'x'", r"\[\[tags\]\] number 1: missing key tag"),
        ("[[tags]]\ntag = 'DP'", "found only a tag, expected exactly one of name, description"),
        (
            "[[tags]]\nname = 'x'\nstream = 1\ntag = 'DP'",
            "found name and stream, expected exactly one",
        ),
        ("[[tags]]\nname = 3\ntag = 'DP'", "invalid name 3: expected text"),
        ("[[tags]]\nname = 'x'\ntag = 'dp'", "invalid tag 'dp': expected one of DP, TP"),
        ("[[tags]]\nranks = [0, -1]\ntag = 'DP'", "invalid ranks .*: expected a list of ranks"),
        ("[[tags]]\nranks = 'all'\ntag = 'DP'", "invalid ranks 'all': expected a list"),
        ("[[tags]]\nstream = '7'\ntag = 'DP'", "invalid stream '7': expected a number"),
        (
            "[[tags]]\ncommunicator = '0xg'\ntag = 'DP'",
            "invalid communicator '0xg': expected a num",
        ),
        ("[[tags]]\nnme = 'x'\ntag = 'DP'", "unknown key 'nme'.*mean 'name'"),
        ("[[kernels]]\nop = 'AllReduce'", "number 1: missing key pattern"),
        ("[[kernels]]\npattern = 'x'", "missing key op"),
        (
            "[[kernels]]\npattern = '('\nop = 'AllReduce'",
            "pattern: invalid regular expression '\\('",
        ),
        ("[[kernels]]\npattern = 'x'\nop = 'Allreduce'", "expected one of.*mean 'AllReduce'"),
        ("[[kernels]]\npattern = 'x'\nop = 'OTHER'\ntag = 'X'", "invalid tag 'X'"),
        (
            "[iterations]\nregex = '['",
            r"\[iterations\]: regex: invalid regular expression '\['",
        ),
        ("[iterations]\nregex = 1", "invalid regex 1: expected text"),
        (
            "[link]\nbandwidth = 400",
            r"\[link\] bandwidth: invalid bandwidth '400': no unit; expected a number and",
        ),
        ("[link]\nspeed = '1GB/s'", r"\[link\]: unknown key 'speed'"),
        ("tp = 1\ntp", "not TOML: .*at end of document"),
        ("tp = 1 1", "not TOML: .*line 1"),
        ("a = " + "[" * 100_000, "not TOML"),
        ("a = " + "9" * 5_000, "not TOML"),
        (b"\xff = 1", "byte 0 is not UTF-8"),
        (b"#" * (1 << 21), "larger than 1048576 bytes"),
    ],
)
def test_an_invalid_file_is_an_error_with_path_and_key(written, text, message):
    path = written(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 400


def test_a_missing_file_is_an_error(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read(path)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_card():
    line = Config(parallel=Parallel(tp=4), bandwidth=1e9)
    file = Config(
        parallel=Parallel(tp=2, pp=2, framework="deepspeed"),
        tags=(TagRule(field="name", value="a", tag="DP"),),
        iterations="x",
    )
    card = Config(
        parallel=Parallel(order="tp-pp-dp", cp=2),
        tags=(TagRule(field="name", value="b", tag="TP"),),
        scale_up=5.0,
    )
    merged = line.over(file).over(card)
    assert merged.parallel == Parallel(tp=4, pp=2, cp=2, framework="deepspeed")
    assert [rule.value for rule in merged.tags] == ["a", "b"]
    assert (merged.iterations, merged.bandwidth, merged.scale_up) == ("x", 1e9, 5.0)


PARTS = st.builds(
    Config,
    parallel=st.builds(
        Parallel,
        tp=st.none() | st.integers(1, 3),
        order=st.none() | st.sampled_from(["tp-dp", "dp-tp"]),
        framework=st.none() | st.sampled_from(["megatron", "deepspeed"]),
    ),
    iterations=st.none() | st.sampled_from("ab"),
)


@given(PARTS, PARTS, PARTS)
def test_merging_of_configurations_is_associative(a, b, c):
    assert a.over(b).over(c) == a.over(b.over(c))
    assert a.over(Config()) == Config().over(a) == a


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("toml") / "job.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(ConfigError):
        assert isinstance(read(path), Config)


@pytest.mark.parametrize(
    ("sizes", "ranks", "world"),
    [
        ({}, [0, 1], None),
        ({"dp": 2}, [0, 1], 2),
        ({"dp": 2, "pp": 2}, [0, 1], 4),
        ({"dp": 2}, [0, 7], 8),
        ({"tp": 2}, [0, 1], 2),
        ({"tp": 2}, [0, 3], 4),
        ({"cp": 4, "pp": 2}, [0], 8),
    ],
)
def test_an_unrecorded_world_size_is_the_number_of_ranks(sizes, ranks, world):
    assert Parallel(**sizes).assumed_world(ranks) == world


def test_sizes_from_a_card_do_not_count_as_given_by_the_user():
    card = Config(parallel=Parallel(tp=2, dp=4))
    for own, words in ((Parallel(), ""), (Parallel(dp=8), "--dp 8")):
        whole = Config(parallel=own).with_user_sizes().over(card)
        assert whole.tag_rules(None).grid_words == words
        assert whole.with_user_sizes().tag_rules(None).grid_words == words
