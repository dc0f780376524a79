"""Test that extreme values of every option are refused briefly or harmless."""

import math
import re
import resource
from itertools import islice
from pathlib import Path

import click
import pytest
from builders.commands import words_of
from builders.fault_tools import in_time, refused
from builders.opened import open_run
from fuzz import options

import fastcomm
from fastcomm.cli.parameter_types import Number, numbers
from fastcomm.errors import ConfigError
from fastcomm.hardware import clusters
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions

MOST_MEMORY = 1 << 30
COMMANDS = options.commands()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    found = options.make(tmp_path_factory.mktemp("inputs"))
    for name in COMMANDS:  # kernels compile here, and not within the time of a case
        options.run(options.base(name, found))
    return found


def peak(*, forget=False):
    """The most memory that this process has had since it was last forgotten, in bytes."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("parts", [4, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", COMMANDS)
def test_extreme_values_are_refused_briefly_or_harmless(inputs, name, parts):
    """Each command by a quarter of them, another one than that of the commands before it."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    own = [*COMMANDS].index(name) % parts
    for case in islice(options.cases(name, COMMANDS[name], inputs), own, None, parts):
        before = peak(forget=True)
        with in_time():
            kind, said = options.run(case.words)
            if kind == "slow":  # what a busy machine does once, a slow case does again
                kind, said = options.run(case.words)
        shown = f"{name} {case.parameter}={case.value[:80]}: {kind}: {said[-2000:]}"
        assert kind in ("read", "refused"), shown
        assert peak() - before < MOST_MEMORY, shown
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert name == "mcp" or most == begun, "starts processes"  # a server has a worker


@pytest.mark.parametrize("name", COMMANDS)
def test_every_numeric_option_has_a_least_and_a_most(name):
    for each in COMMANDS[name].params:
        if not isinstance(each.type, click.types.IntParamType | click.types.FloatParamType):
            continue
        if isinstance(each, click.Option) and each.count:
            continue
        ends = getattr(each.type, "min", None), getattr(each.type, "max", None)
        assert all(end is not None and math.isfinite(end) for end in ends), each.name
        if isinstance(each.type, click.FloatRange):
            assert isinstance(each.type, Number), f"{each.name} takes NaN"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-99999999999", "expected at most 1048576 numbers"),
        ("0-1048576", "expected at most 1048576 numbers"),
        ("3-1", "'3-1'"),
        ("", "''"),
        ("9" * 5000, "expected numbers from 0 to 9007199254740991"),
        ("1,nan", "'nan'"),
    ],
)
def test_lists_of_numbers_have_a_maximum_length(text, words):
    with pytest.raises(ConfigError, match="invalid --ranks ") as error:
        numbers("--ranks", text)
    assert words in str(error.value)
    assert len(str(error.value)) < 250


def test_lists_of_numbers_are_read():
    assert numbers("--ranks", "0-2, 12,5") == (0, 1, 2, 12, 5)
    assert len(numbers("--ranks", "1-1048576")) == 1 << 20


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "metrics {run} --link-bandwidth 1e308GB/s",
            "--link-bandwidth: invalid bandwidth '1e308GB/s'",
        ),
        ("metrics {run} --ranks 0-99999999999", "invalid --ranks '0-99999999999': expected at"),
        ("metrics {run} --dask http://x", "invalid --dask 'http://x': expected file:"),
        (
            "metrics {run} --dask tcp://x:99999",
            "invalid --dask 'tcp://x:99999': expected file:",
        ),
        (
            "isp --world-size 1000000000000",
            "invalid world size '1000000000000': expected at most",
        ),
        (
            "isp --world-size 8-99999999999",
            "invalid world size '99999999999': expected at most",
        ),
        ("dispatch compare --inter-start 2", "invalid --inter-start '2': expected a number"),
        ("dispatch compare --intra-start 2m", "and a unit (ns, us, ms or s), as in 10us"),
        ("what-if {run} --fuse-below 5", "invalid --fuse-below '5': expected a number and a u"),
        ("what-if {run} --set comm=1e300s", "invalid duration '1e300s': expected a number and"),
        ("dispatch generate --hot-ranks 0:1e308 -o x", "invalid --hot-ranks '0:1e308'"),
        ("dispatch generate --hot-ranks 0:nan -o x", "invalid --hot-ranks '0:nan'"),
    ],
)
def test_extreme_values_are_errors_with_the_valid_range(inputs, line, words):
    isp = ["--model", "7B", "--seq-len", "4Ki", "--global-batch", "1Mi"]
    line = words_of(line, **inputs)
    said = refused(*line[:1], *(isp if line[0] == "isp" else ()), *line[1:])
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("isp", "--imbalance", "nan"),
        ("isp", "--imbalance", "inf"),
        ("isp", "--penalty", "nan"),
        ("stragglers", "--threshold", "nan", "x.parquet"),
        ("dispatch", "place", "--replicas", "1e9", "."),
        ("dispatch", "place", "--replicas", "nan", "."),
        ("dispatch", "compare", "--incast", "inf"),
        ("dispatch", "compare", "--zipf-alpha", "nan"),
        ("doctor", "--dask-wait", "nan"),
    ],
)
def test_values_that_are_no_number_of_the_range_are_wrong_usage(words):
    result = options.run(words)
    assert result[0] == "refused"
    assert "Invalid value" in result[1]


OUTPUTS = [
    ("metrics", "--output"), ("metrics", "--html"), ("report", "--html"),
    ("compare", "--output"), ("critical-path", "--overlay"), ("critical-path", "--save"),
    ("what-if", "--html"), ("what-if", "--trace"), ("stragglers", "--trace"),
    ("kernels", "--output"), ("isp", "--html"),
    ("dispatch generate", "--output"),
    ("dispatch compare", "--output"), ("ingest", "--output"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option"), OUTPUTS)
def test_an_empty_output_name_is_refused(inputs, name, option):
    kind, said = options.run((*options.base(name, inputs), option, ""))
    assert kind == "refused"
    assert f"invalid {option} '': expected a file or a directory" in said


def test_an_empty_path_is_not_the_working_directory(tmp_path, monkeypatch, inputs):
    monkeypatch.chdir(inputs["run"])
    for name in ("metrics", "info", "kernels", "what-if", "ingest"):
        words = ["-o", tmp_path / "store"] if name == "ingest" else []
        assert "an empty path; pass a trace" in refused(name, "", *words)


API = [
    lambda run: compute_metrics(run, MetricsOptions(link_bandwidth=math.nan)),
    lambda run: compute_metrics(run, MetricsOptions(link_bandwidth=math.inf)),
    lambda run: compute_metrics(run, MetricsOptions(link_bandwidth="1e308GB/s")),
    lambda run: compute_metrics(run, MetricsOptions(link_bandwidth=-1.0)),
    lambda run: compute_metrics(run, MetricsOptions(link_bandwidth=50)),
    lambda _: fastcomm.Recipe.of(num_nodes=10**12),
    lambda _: fastcomm.Recipe.of(seq_len=1 << 64),
    lambda _: fastcomm.Recipe.of(num_layers=99_999_999_999),
    lambda _: fastcomm.Recipe.of(zipf_alpha=math.nan),
    lambda _: fastcomm.Recipe.of(zipf_alpha=1e308),
    lambda _: fastcomm.Recipe.of(seed=-1),
    lambda _: fastcomm.Recipe.of(seed=1 << 32, law="seed"),
]


@pytest.mark.parametrize("call", API)
def test_functions_check_the_ranges_of_options(inputs, call):
    run = open_run(inputs["run"])
    with pytest.raises(
        ConfigError,
        match=r"found|invalid|more than the maximum|no unit; expected a number and a unit",
    ):
        call(run)


ASKED = {"model": "7B", "world_size": 8, "seq_len": 4096, "global_batch": 1 << 20}


@pytest.mark.parametrize(
    "words",
    [
        {"imbalance": math.nan}, {"imbalance": math.inf}, {"penalty": math.nan},
        {"world_size": "8-99999999999"}, {"memory": "1e308"}, {"global_batch": 1 << 60},
        {"seq_len": "9" * 5000}, {"vocab": "99999999T"},
    ],
)  # fmt: skip
def test_a_search_checks_the_ranges_of_options(words):
    with pytest.raises(ConfigError):
        fastcomm.search_strategies(**{**ASKED, **words})


BAD = ["nan", "inf", "-1", "1e308", "9" * 30, "true"]


def numbers_of(text):
    """Where the numbers of a TOML text are, without its comments."""
    return [
        each.span() for each in re.finditer(r'(?<![\w."])\d[\d.e+]*(?=[\s,\]}]|$)', text, re.M)
    ]


@pytest.mark.parametrize("value", BAD)
def test_numbers_of_a_cluster_file_have_a_range(tmp_path, value):
    text = re.sub(
        "#.*", "", (Path(clusters.__file__).parent / "data" / "a800.toml").read_text()
    )
    places = numbers_of(text)
    assert len(places) > 40
    path = tmp_path / "hardware.toml"
    for begin, end in places:
        path.write_text(text[:begin] + value + text[end:])
        with pytest.raises(ConfigError, match=str(path)):
            clusters.load(path)


@pytest.mark.parametrize("value", [*BAD, "0"])
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("c.toml", "[parallel]\ntp = {}\n", "metrics {run} --config c.toml"),
        ("c.toml", '[link]\nbandwidth = "{}GB/s"\n', "metrics {run} --config c.toml"),
        ("m.toml", "hidden = 64\nheads = 4\nlayers = {}\n", "isp --model m.toml {isp}"),
        ("e.toml", 'scale = ["comm={}x"]\n', "what-if {run} --edits e.toml"),
        ("m.yaml", "dp_size: {}\n", "stragglers {table} --meta m.yaml"),
    ],
)
def test_numbers_of_files_are_refused_with_their_file(
    tmp_path, monkeypatch, inputs, name, text, line, value
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text.format(value))
    isp = "--world-size 8 --seq-len 4Ki --global-batch 1Mi"
    assert name in refused(*words_of(line.replace("{isp}", isp), **inputs))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "9" * 30, '"x"', "[1]", "true"])
@pytest.mark.parametrize(
    "key", ["dtype_size", "wp_penalty_coefficient", "sequence_length", "vocab_size"]
)
def test_numbers_of_an_original_configuration_are_refused_with_their_key(tmp_path, key, value):
    path = tmp_path / "c.json"
    path.write_text(f'{{"{key}": {value}}}')
    words = ["--model", "7B", "--world-size", "8", "--seq-len", "4Ki", "--global-batch", "1Mi"]
    assert f"{path}: invalid {key} " in refused("isp", "--compat-config", path, *words)


@pytest.mark.parametrize("value", ["1e308", "-1", "9" * 30, "nan", "x"])
def test_numbers_of_edits_are_refused(inputs, value):
    said = refused("stragglers", inputs["table"], "--scale", f"all={value}")
    assert f"invalid factor '{value}': expected a number from 1e-06 to 1000000, or 0" in said
