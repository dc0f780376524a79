"""Test that the decompressed size of an Arrow stream is known before decompression."""

import io
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from fastcomm import arrow_files

TABLE = pa.table(
    {
        "n": np.zeros(10_000, np.int64),
        "text": ["word", None] * 5_000,
        "code": pa.array(["x" * 100, "y"] * 5_000).dictionary_encode(),
    }
)


def stream(codec=None, **how):
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec, **how)
    with pa.ipc.new_stream(buffer, TABLE.schema, options=options) as writer:
        writer.write_table(TABLE, max_chunksize=4_000)
    return buffer.getvalue()


def said(content):
    found = []
    arrow_files.check_inflated(io.BytesIO(content), found.append)
    return found


def decoded(content):
    """Bytes of all buffers, each as long as Arrow makes it."""
    total = 0
    with pa.ipc.open_stream(content) as reader:
        words = None
        for batch in reader:
            for column in batch.columns:
                total += sum(len(each) for each in column.buffers() if each is not None)
            words = batch["code"].dictionary
    return total + sum(len(each) for each in words.buffers() if each is not None)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_buffer_lengths_give_the_decompressed_size(codec):
    content = stream(codec)
    assert len(said(content)) == 5  # the schema, the words, three batches
    assert said(content) == sorted(said(content))
    assert said(content)[-1] == pytest.approx(decoded(content), rel=0.01)
    assert said(content)[-1] > 5 * len(content)


def test_an_uncompressed_stream_is_not_a_bomb():
    assert said(stream()) == [0] * 5


def test_a_stream_of_the_old_format_without_continuation_marker_is_read():
    content = stream("zstd", use_legacy_format=True)
    assert said(content) == said(stream("zstd"))
    assert said(content[:-4]) == said(content), "no end of stream"


def test_a_body_that_is_longer_than_the_file_is_an_error():
    content = stream()
    with pytest.raises(ValueError, match=r"a body of .* bytes, but only .* remain"):
        said(content[: len(content) * 2 // 3])


def test_an_offset_outside_the_file_is_an_error():
    content = stream("zstd")
    table = 8 + int.from_bytes(content[8:12], "little")
    for place in (8, table):
        bad = content[:place] + b"\xff\xff\xff\x7f" + content[place + 4 :]
        with pytest.raises(ValueError, match=r"offset|message"):
            said(bad)
    with pytest.raises(ValueError, match="ends inside of a message"):
        said(b"\xff\xff\xff\xff\xff\xff\xff\x7f")


def test_random_damage_is_an_error_or_a_number():
    content, random = stream("lz4"), Random(5)
    for _ in range(3_000):
        bad = bytearray(content)
        for _ in range(random.randint(1, 3)):
            bad[random.randrange(len(bad))] = random.randrange(256)
        try:
            found = said(bytes(bad))
        except ValueError:
            continue
        assert all(each >= 0 for each in found)
