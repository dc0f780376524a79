"""The scanner on small texts: every way that JSON may be written, and blocks of any size."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import config

from fastcomm.errors import TraceFileError
from fastcomm.readers import blocks, chrome
from fastcomm.readers.kineto_layout import METRICS
from fastcomm_kernels import json_scan, words

NULL = json_scan.NULL


def scanned(tmp_path, text, **options):
    path = tmp_path / "rank0.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return chrome.scan_file(path, METRICS, **options)


def rows(found):
    columns = found.columns
    return [
        {
            "name": found.texts[columns["name"][row]],
            **{
                key: None if columns[key][row] == NULL else int(columns[key][row])
                for key in ("start", "stop", "correlation", "stream", "bytes")
            },
        }
        for row in range(len(columns["name"]))
    ]


NAMES = st.one_of(st.sampled_from(["gemm", "ncclDevKernel_X", ""]), st.text(max_size=12))
EVENT = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "M", "i"]),
        "cat": st.sampled_from(
            ["kernel", "gpu_memcpy", "cpu_op", "cuda_runtime", "python_function"]
        ),
        "name": NAMES,
        "pid": st.one_of(st.integers(0, 9), st.sampled_from(["Spans", ""])),
        "tid": st.one_of(st.integers(-(2**31), 2**31), st.text(max_size=3)),
        "ts": st.one_of(st.integers(0, 10**12), st.decimals(0, 10**9, places=3).map(float)),
        "dur": st.one_of(st.integers(0, 10**6), st.floats(0, 1e6).map(lambda x: round(x, 3))),
        "args": st.dictionaries(
            st.sampled_from(["stream", "correlation", "bytes", "grid", "other", "x y"]),
            st.one_of(
                st.integers(0, 2**40),
                st.lists(st.text(max_size=3), max_size=3),
                st.text(max_size=5),
            ),
            max_size=5,
        ),
    },
    optional={
        "id": st.integers(),
        "bp": st.just("e"),
        "extra": st.lists(st.dictionaries(NAMES, NAMES)),
    },
)


def by_definition(events):
    kinds = {"kernel", "gpu_memcpy", "cuda_runtime"}
    found = []
    for event in events:
        if event["ph"] != "X" or event["cat"] not in kinds:
            continue
        start = round(event["ts"] * 1000)
        numbers = {
            key: int(value) if isinstance(value := event["args"].get(key), int) else None
            for key in ("correlation", "stream", "bytes")
        }
        found.append(
            {
                "name": event["name"],
                "start": start,
                "stop": start + round(event["dur"] * 1000),
                **numbers,
            }
        )
    return found


def plain(text):
    """Whether a text has only what UTF-8 can hold, and is no number in quotes."""
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)


@given(
    st.lists(EVENT, max_size=8),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_valid_way_to_write_events_reads_the_same(
    tmp_path_factory, events, indent, sort, ascii_, data
):
    document = {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}
    if data.draw(st.booleans()):
        document = dict(reversed(document.items()))
    text = json.dumps(document, indent=indent, sort_keys=sort, ensure_ascii=ascii_)
    size = data.draw(st.integers(1, 300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", size)
        found = scanned(tmp_path_factory.mktemp("any"), text.encode("utf-8", "surrogatepass"))
    texts_are_numbers = any(
        isinstance(v, str) and v.strip() for e in events for v in e["args"].values()
    )
    if not texts_are_numbers:
        assert rows(found) == by_definition(events)
    assert found.seen == len(events)
    assert found.warnings == ()


def test_chunks_and_words_grow_as_they_fill(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome, "_CHUNK", 3)
    small = words.no_strings
    monkeypatch.setattr(words, "no_strings", lambda slots=4, pool=80: small(slots, pool))
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"kernel number {n} of many",
            "pid": 0,
            "tid": n,
            "ts": n,
            "dur": 1,
            "args": {"dtype": f"T{n}"},
        }
        for n in range(40)
    ]
    found = scanned(tmp_path, json.dumps({"traceEvents": events}))
    assert [row["name"] for row in rows(found)] == [event["name"] for event in events]
    details = [found.texts[found.details["dtype"][place]] for place in found.columns["detail"]]
    assert details == [f"T{n}" for n in range(40)]


def one(members, args="{}"):
    event = f'{{"ph": "X", "cat": "kernel", "name": "a", {members} "args": {args}}}'
    return f'{{"traceEvents": [{event}]}}'


@pytest.mark.parametrize(
    ("args", "correlation"),
    [
        ('{"correlation": 5}', 5),
        ('{"correlation": "5"}', 5),
        ('{"correlation": "5x"}', None),
        ('{"correlation": 68.0}', 68),
        ('{"correlation": -3}', -3),
        ('{"correlation": 18446744073709551615}', None),
        ('{"correlation": null}', None),
        ('{"correlation": [1, {"a": "]"}]}', None),
        ('{"correlation": 1, "correlation": 2}', 2),
        ('{"correlation": 1}, "args": {}', None),
        ('{"correlation": 1}, "args": 7', 1),
        ('{"Correlation": 1, "correlation ": 2, "correlatio": 3}', None),
        ('{"correlation"   :' + " " * 100 + "9" + "\n\t" * 50 + "}", 9),
    ],
)
def test_a_whole_number_is_read_in_every_form_and_other_values_are_null(
    tmp_path, args, correlation
):
    found = scanned(tmp_path, one('"ts": 1, "dur": 2,', args))
    assert rows(found)[0]["correlation"] == correlation


@pytest.mark.parametrize(
    "members",
    [
        '"dur": 1,',
        '"ts": "x",',
        '"ts": null,',
        '"ts": 1, "dur": -1,',
        '"ts" 1,',
        '"ts": 1 "dur": 2,',
        '"\\u0074s": 1,',
        '"ts": 9e18,',
        '"pid": "a\nb",',
        "7,",
    ],
)
def test_an_event_without_a_time_or_a_grammar_is_no_event(tmp_path, members):
    with pytest.raises(TraceFileError, match=r"1 of 1 events do not parse.*at byte 17"):
        scanned(tmp_path, one(members))


@pytest.mark.parametrize(
    "args",
    [
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        "{7: 1}",
        '{"a: 1}',
        '{"corr\\u0065lation": 1}',
        '{"\\u0063orrelation": 1}',
        '{"correlation": "5\n"}',
        '{"a": [1, "b" c]}',
    ],
)
def test_args_without_a_grammar_are_no_args(tmp_path, args):
    with pytest.raises(TraceFileError, match=r"do not parse|truncated"):
        scanned(tmp_path, one('"ts": 1,', args))


def test_categories_of_every_age_are_known(tmp_path):
    cats = [
        "Kernel",
        "kernel",
        "Memcpy",
        "gpu_memset",
        "Runtime",
        "cuda_driver",
        "user_annotation",
    ]
    events = [
        {"ph": "X", "cat": cat, "name": cat, "ts": 1, "dur": 1} for cat in [*cats, "nope", 7]
    ]
    found = scanned(tmp_path, json.dumps(events))
    assert [row["name"] for row in rows(found)] == cats


def test_only_the_collective_calls_among_operators_are_kept(tmp_path):
    names = [
        "aten::mm",
        "record_param_comms",
        "c10d::allreduce_",
        "nccl:all_reduce",
        "record",
        "c10d",
        "",
    ]
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1} for name in names]
    found = scanned(tmp_path, json.dumps(events))
    assert [row["name"] for row in rows(found)] == names[1:4]


def test_args_may_stand_before_the_category(tmp_path):
    event = '{"args": {"stream": 4}, "ts": 1, "name": "a", "cat": "kernel", "ph": "X"}'
    text = f'{{"traceEvents": [{event}]}}'
    assert rows(scanned(tmp_path, text))[0]["stream"] == 4
    text = text.replace('"kernel"', '"python_function"')
    assert rows(scanned(tmp_path, text)) == []


def test_escapes_in_names_are_read_and_what_utf8_cannot_hold_is_replaced(tmp_path):
    text = (
        '{"traceEvents": ['
        + ",".join(
            f'{{"ph": "X", "cat": "kernel", "name": "{name}", "ts": 1}}'
            for name in (r"a\"b\\c\/d", r"\u00e9\ud83d\ude00", r"\ud800x", r"\x")
        )
        + "]}"
    )
    names = [row["name"] for row in rows(scanned(tmp_path, text))]
    assert names[:2] == ['a"b\\c/d', "é😀"]
    for name in names:
        name.encode()


@pytest.mark.parametrize(
    "text", ["[]", '{"traceEvents": []}', '\ufeff{"traceEvents" : [ ] }', " [ ] "]
)
def test_a_trace_may_be_empty_or_a_bare_list(tmp_path, text):
    assert scanned(tmp_path, text).seen == 0


def test_a_long_event_takes_time_in_proportion(tmp_path):
    size = 10**5 if config.DISABLE_JIT else 3 * 10**7
    text = one('"ts": 1,', f'{{"a": "{"x" * size}", "correlation": 3}}')
    assert rows(scanned(tmp_path, text))[0]["correlation"] == 3
