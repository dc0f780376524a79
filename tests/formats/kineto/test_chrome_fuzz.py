"""Test that mutations of real traces lose only the damaged events, with a warning."""

import gzip
import json
import random
import re

import orjson
import pytest
from builders.chrome_files import agrees, found, scan
from oracles.chrome import TwiceError, records

from fastcomm.errors import TraceFileError


def spans_of(text, first, count):
    """Where the events of a valid trace from `first` on begin and end."""
    decoder, at, spans = json.JSONDecoder(), first, []
    while len(spans) < count:
        _, end = decoder.raw_decode(text, at)
        spans.append((at, end))
        comma = re.compile(r"\s*,\s*").match(text, end)
        if not comma:
            break
        at = comma.end()
    return spans


def slices(kineto):
    """Short valid traces cut out of real ones."""
    rng = random.Random(5)
    for name, count in (
        ("nccl_2rank_rank0.json.gz", 60),
        ("dlrm_8rank/worker3_step_12.1694128201557.pt.trace.json.gz", 60),
        ("sampled_2of128/rank-1.json.gz", 60),
        ("gloo_4rank/rank2.pt.trace.json.gz", 40),
    ):
        text = gzip.decompress((kineto / name).read_bytes()).decode()
        begin = re.search(r'"traceEvents"\s*:\s*\[\s*', text).end()
        spans = spans_of(text, begin, 10**6)
        tail, spans = text[spans[-1][1] :], spans[:1500]
        for first in rng.sample(range(len(spans) - count), 2):
            part = spans[first : first + count]
            yield text[:begin] + text[part[0][0] : part[-1][1]] + tail, begin


def mutated(rng, text):
    """The text with one piece of damage: what was cut from where, and what stands there now."""
    at = rng.randrange(len(text))
    size = rng.choice([1, 1, 1, 2, 5, 40, 300])
    kind = rng.randrange(6)
    if kind == 0:
        return at, at + 1, bytes([text[at] ^ 1 << rng.randrange(8)])
    if kind == 1:
        return at, min(len(text), at + size), b""
    if kind == 2:
        return (
            at,
            at,
            rng.choice(
                [b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\n", b"\0", b"\xff", b"7"]
            ),
        )
    if kind == 3:
        other = rng.randrange(len(text))
        return at, min(len(text), at + size), text[other : other + size]
    if kind == 4:
        return at, min(len(text), at + size), rng.randbytes(size)
    marks = [k for k in range(at, min(len(text), at + 400)) if text[k] in b'{}[]",:']
    at = rng.choice(marks or [at])
    return at, at + 1, rng.choice([b"", b'"', b"{", b"}", b"[", b"]"])


def test_a_mutation_loses_only_the_events_that_it_hits(kineto, tmp_path):
    rng = random.Random(11)
    outcomes = {"read": 0, "warned": 0, "refused": 0, "valid": 0}
    for text, begin in slices(kineto):
        original = text.encode()
        spans = [
            (len(text[:a].encode()), len(text[:b].encode()))
            for a, b in spans_of(text, begin, 10**6)
        ]
        assert len(spans) >= 40
        every = records(original)
        assert len(every) == len(spans)
        for _ in range(100):
            start, stop, patch = mutated(rng, original)
            damaged = original[:start] + patch + original[stop:]
            shift = len(patch) - (stop - start)
            safe = {
                a + (shift if a >= stop else 0): each
                for (a, b), each in zip(spans, every, strict=True)
                if (b <= start or a >= stop) and isinstance(each, dict)
            }
            outcomes[check(tmp_path, damaged, safe)] += 1
    assert outcomes["read"] + outcomes["warned"] + outcomes["valid"] > 2 * outcomes["refused"]


ADDRESS = re.compile(r"at byte \d|two lists|no .traceEvents|begins with|outer object")


def check(tmp_path, damaged, safe):
    """Whatever hits nothing is there, at its offset; a valid text is read as it stands."""
    try:
        scanned = scan(tmp_path, damaged)
    except TraceFileError as error:
        if not ADDRESS.search(str(error)):
            raise AssertionError(f"no address: {error}") from error
        return "refused"
    rows, offsets = found(scanned)
    there = dict(zip(offsets, rows, strict=True))
    for offset, expected in safe.items():
        assert offset in there, (
            offset,
            damaged[max(0, offset - 300) : offset + 300],
            scanned.warnings,
        )
        assert agrees(there[offset], expected)
    try:
        orjson.loads(damaged)
        wanted = [each for each in records(damaged) if each != "unwanted"]
    except (ValueError, TwiceError, KeyError):
        return "warned" if scanned.warnings else "read"
    assert len(rows) == len([each for each in wanted if each])
    assert all(map(agrees, rows, filter(None, wanted)))
    assert len(scanned.warnings) == (None in wanted)
    return "valid"


def test_a_real_file_cut_anywhere_gives_its_whole_events(kineto, tmp_path):
    rng = random.Random(3)
    for text, begin in slices(kineto):
        spans = spans_of(text, begin, 10**6)
        every = records(text.encode())
        for n in rng.sample(range(begin + 1, spans[-1][1]), 25):
            cut = text[:n].encode()
            whole = sum(b <= n for _, b in spans)
            with pytest.raises(
                TraceFileError, match=rf"at byte {len(cut)} after {whole} whole"
            ):
                scan(tmp_path, cut)
            rows, _ = found(scan(tmp_path, cut, allow_truncated=True))
            wanted = [each for each in every[:whole] if isinstance(each, dict)]
            assert len(rows) == len(wanted)
            assert all(map(agrees, rows, wanted))
