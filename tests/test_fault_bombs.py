"""Test that small files that expand are refused before memory is allocated."""

import gzip
import io
import json
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.commands import words_of
from builders.fault_files import BASE, OPERATION, READERS, SHAPE, beside, ends
from builders.fault_tools import agree, refused, run
from builders.growth import MOST, growth
from builders.nsys_report import SMALL

from fastcomm import files
from fastcomm.compat import hta
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.synthetic.nsys.export import write_nsys


@pytest.fixture
def folder(tmp_path):
    return beside(tmp_path)


@pytest.fixture
def small_bombs(monkeypatch):
    """What becomes large here is a MiB and not 64."""
    monkeypatch.setattr(files, "SMALL", 1 << 20)


def bomb(path, head=b"", body=b" " * (1 << 20), times=4, tail=b""):
    path.write_bytes(gzip.compress(head + body * times + tail))
    return path


OPERATIONS_CSV = b"rank,step,optype,start_ts,duration\n" + b"0,0,forward,0,1\n" * 300_000


@pytest.mark.usefixtures("small_bombs")
def test_a_gzip_bomb_is_refused_unless_the_ratio_is_allowed(folder, monkeypatch):
    head, tail = BASE.encode().split(b'"traceEvents": [')
    path = bomb(folder / "rank0.json.gz", head + b'"traceEvents": [', tail=tail)
    assert "Set FASTCOMM_MAX_RATIO=N" in refused("metrics", path)
    monkeypatch.setenv("FASTCOMM_MAX_RATIO", "2000")
    assert run("metrics", path)[0] == 0
    monkeypatch.setenv("FASTCOMM_MAX_TEXT_GIB", "0.002")
    assert "expands to more than 0.002 GiB. Set FASTCOMM_MAX_TEXT" in refused("metrics", path)
    monkeypatch.setenv("FASTCOMM_MAX_RATIO", "many")
    assert "invalid FASTCOMM_MAX_RATIO 'many'" in refused("metrics", path)


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize(
    ("command", "name", "head"),
    [
        ("kernels", "trace.json", b'{"traceEvents": ['),
        ("metrics", "a.jsonl.gz", b'{"header": 1, "coll_perf": 1}\n'),
        ("metrics --config {folder}/t.toml", "table.csv.gz", OPERATIONS_CSV),
    ],
)
def test_every_reader_of_gzip_refuses_a_bomb(folder, command, name, head):
    path = bomb(folder / name, head)
    assert "possibly a decompression bomb" in refused(*words_of(command, folder=folder), path)


def test_a_document_too_large_for_memory_is_refused(folder, monkeypatch):
    run("ingest", folder / "good.json", "-o", folder / "store")
    monkeypatch.setenv("FASTCOMM_MAX_DOCUMENT_GIB", "1e-7")
    said = refused("metrics", folder / "store")
    assert "fastcomm.json: larger than 1e-07 GiB, and must be read as a whole. " in said


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("metrics --config {folder}/t.toml", "table.parquet"),
        ("stragglers", "table.parquet"),
        (f"dispatch compare {SHAPE}", "w.parquet"),
        (
            "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --calibrate",
            "events.parquet",
        ),
    ],
)
def test_a_parquet_file_of_one_value_a_million_times_is_a_bomb(folder, command, name):
    rows = 1 << 20
    constant = {name: pa.array(np.zeros(rows, np.int64)) for name in OPERATION if name != "op"}
    constant |= {
        "optype": pa.array(["forward-compute"]).take(pa.array(np.zeros(rows, np.int32))),
        "src": pa.array(np.zeros(rows, np.int32)),
        "expert": pa.array(np.zeros(rows, np.int32)),
        **{key: pa.array(np.ones(rows, np.int64)) for key in ("group_size", "bytes")},
        "op": pa.array(np.zeros(rows, np.int32)),
        "duration_ns": pa.array(np.ones(rows, np.int64)),
    }
    pq.write_table(pa.table(constant), folder / name, compression="zstd")
    assert "possibly a decompression bomb" in refused(
        *words_of(command, folder=folder), folder / name
    )


@pytest.mark.usefixtures("small_bombs")
def test_a_store_whose_columns_are_a_bomb_is_refused(folder):
    run("ingest", folder / "good.json", "-o", folder / "store")
    path = folder / "store" / "rank-00000.parquet"
    table = pq.read_table(path)
    many = table.take(pa.array(np.zeros(1 << 18, np.int32)))
    pq.write_table(many.replace_schema_metadata(table.schema.metadata), path)
    agree(folder / "store")
    assert "possibly a decompression bomb" in refused("metrics", folder / "store")


@pytest.mark.parametrize("column", ["start", "kind"])
@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary()])
def test_a_store_with_a_repeated_long_string_is_refused(folder, column, kind):
    run("ingest", folder / "good.json", "-o", folder / "store")
    path = folder / "store" / "rank-00000.parquet"
    table = pq.read_table(path)
    words = pa.array(["x" * (1 << 14)]).cast(kind).take(pa.array([0] * len(table)))
    place = table.column_names.index(column)
    table = table.set_column(place, pa.field(column, kind), words)
    pq.write_table(table, path)
    agree(folder / "store")
    assert "damaged, or no file of a store" in refused("metrics", folder / "store")


@pytest.mark.usefixtures("small_bombs")
def test_an_npz_bomb_is_refused(folder):
    zeros = np.zeros((1 << 17, 4), np.int64)
    np.savez_compressed(folder / "w.npz", src_gpu=zeros[:, 0], target_experts=zeros)
    assert "possibly a decompression bomb" in refused("dispatch", "compare", folder / "w.npz")


def npy(shape, descr="<i8", data=b""):
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


@pytest.mark.parametrize(
    "content",
    [
        npy((1 << 50, 8)),
        npy((1 << 62, 1 << 62)),
        npy((-1, 8)),
        npy((2, 2), data=b"12345678"),
        b"\x93NUMPY\x01\x00\x76\x00{" + b"(" * 116 + b"\n",
        b"\x93NUMPY\x03\x00",
    ],
)
def test_an_array_shorter_than_its_header_declares_is_refused(folder, content):
    (folder / "w.npy").write_bytes(content)
    assert "w.npy: cannot read a plain array from .npy" in refused(
        "dispatch", "compare", folder / "w.npy"
    )
    with zipfile.ZipFile(folder / "w.npz", "w") as archive:
        archive.writestr("src_gpu.npy", content)
        archive.writestr("target_experts.npy", content)
    assert "w.npz: cannot read a plain array from .npz" in refused(
        "dispatch", "compare", folder / "w.npz"
    )


@pytest.mark.parametrize("name", ["w.npy", "w.npz"])
def test_pickled_objects_in_an_array_are_not_loaded(folder, name):
    class Runs:
        def __reduce__(self):
            return (Path.touch, (folder / "ran",))

    objects = np.array([Runs()], object)
    if name == "w.npy":
        np.save(folder / name, objects, allow_pickle=True)
    else:
        np.savez(folder / name, src_gpu=objects, target_experts=objects)
    assert "Python objects are not loaded" in refused("dispatch", "compare", folder / name)
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("small_bombs")
def test_a_saved_path_with_a_bomb_in_it_is_refused(folder):
    run("critical-path", folder / "good.json", "--save", folder / "path")
    whole = zipfile.ZipFile(folder / "path.zip")
    members = {name: whole.read(name) for name in whole.namelist()}
    many = pq.read_table(io.BytesIO(members["nodes.parquet"]))
    many = many.take(pa.array(np.zeros(1 << 20, np.int32)))
    pq.write_table(many, buffer := io.BytesIO())
    with zipfile.ZipFile(folder / "bomb.zip", "w") as archive:
        for name, content in (members | {"nodes.parquet": buffer.getvalue()}).items():
            archive.writestr(name, content)
    with pytest.raises(FastcommError, match="possibly a decompression bomb"):
        hta.restore_cpgraph(folder / "bomb.zip")
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (1 << 24))
    with pytest.raises(FastcommError, match="compressed or larger"):
        hta.restore_cpgraph(folder / "bomb.zip")


@pytest.mark.parametrize("pattern", ["[", "(" * 100_000, "a{99999999999}", 7])
def test_a_saved_path_with_an_invalid_pattern_is_refused(folder, pattern):
    run("critical-path", folder / "good.json", "--save", folder / "path")
    with zipfile.ZipFile(folder / "path.zip") as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    manifest = json.loads(members["manifest.json"])
    manifest["about"]["data_load"] = [pattern]
    with zipfile.ZipFile(folder / "strange.zip", "w") as archive:
        for name, content in (members | {"manifest.json": json.dumps(manifest)}).items():
            archive.writestr(name, content)
    with pytest.raises(FastcommError, match="not a saved critical path"):
        hta.restore_cpgraph(folder / "strange.zip")


YAML_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_that_multiply_are_refused(folder):
    (folder / "none" / "rank0.json").write_text(BASE)
    (folder / "none" / "none.yaml").write_text(YAML_BOMB)
    assert "more than 16 YAML aliases" in refused("metrics", folder / "none")
    (folder / "m.yaml").write_text(YAML_BOMB)
    said = refused("stragglers", folder / "good.parquet", "--meta", folder / "m.yaml")
    assert "more than 16 YAML aliases" in said


@pytest.mark.parametrize(
    ("command", "name"), [pair for pair in READERS if pair[1].endswith((".toml", ".yaml"))]
)
def test_a_configuration_that_is_nested_or_huge_is_refused(folder, command, name):
    (folder / name).write_text("a = " + "[" * 100_000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("a: " + "[" * 100_000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("a = " + "9" * 5000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("# " + "x" * (1 << 21))
    assert "larger than 1048576 bytes" in ends(command, name, folder)


def of_one_word(rows, words, kind):
    """A column of a word of 16 KiB, which Parquet writes once and Arrow so many times."""
    word = pa.array(["x" * (1 << 14)]).cast(kind)
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), word)
    return {**{name: pa.array(np.zeros(rows, np.int64)) for name in words}, "optype": column}


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("metrics --config {folder}/t.toml", "table.parquet"),
        ("stragglers", "table.parquet"),
        (f"dispatch compare {SHAPE}", "w.parquet"),
    ],
)
def test_a_long_string_repeated_a_thousand_times_is_a_bomb(folder, command, name, kind):
    table = pa.table(of_one_word(1000, (*OPERATION, "src", "expert"), kind))
    pq.write_table(table, folder / name, store_schema=False)
    assert "possibly a decompression bomb" in refused(
        *words_of(command, folder=folder), folder / name
    )


def test_strings_inside_lists_are_refused(folder):
    lists = pa.array([["x" * (1 << 14)]] * 1000)
    pq.write_table(pa.table({"src": [0] * 1000, "expert": lists}), folder / "w.parquet")
    said = refused(*words_of(f"dispatch compare {SHAPE}", folder=folder), folder / "w.parquet")
    assert "nested texts are not supported; expected plain columns, or lists of numbers" in said


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_stream_that_inflates_is_a_bomb(folder, codec, monkeypatch):
    monkeypatch.setenv("FASTCOMM_MAX_RATIO", "3")
    (export,) = write_nsys(SMALL, folder / "made", ranks=[0], kind="arrowdir")
    file = export / "StringIds.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        table = reader.read_all()
    rows = np.zeros(1 << 17, np.int32)
    options = pa.ipc.IpcWriteOptions(compression=codec)
    for wanted, many in ((False, table), (True, table.take(pa.array(rows)))):
        with pa.ipc.new_stream(file, table.schema, options=options) as stream:
            stream.write_table(many)
        if not wanted:
            assert run("metrics", export)[0] == 0
    assert "StringIds.arrow: " in refused("metrics", export)
    assert "possibly a decompression bomb" in refused("metrics", export)


def test_a_stream_that_states_more_bytes_than_any_memory_has_is_refused(folder):
    (export,) = write_nsys(SMALL, folder / "made", ranks=[0], kind="arrowdir")
    file = export / "StringIds.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        table = reader.read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)
    content, length = file.read_bytes(), table["id"].nbytes.to_bytes(8, "little")
    assert length in content
    file.write_bytes(content.replace(length, (1 << 50).to_bytes(8, "little")))
    said = refused("metrics", export)
    assert f"StringIds.arrow: malloc of size {1 << 50} failed" in said
    assert said.count("\n") == 1


PARTS = ["a", '"b.c"', "'d'", "e-1", "e_2"]


@pytest.mark.parametrize("levels", [30, 40])
@pytest.mark.parametrize(
    "line", ["{} = 1", "[{}]", "[[ {} ]]", "x = {{ {} = 2 }}", "x.y . {} = 1"]
)
def test_a_toml_key_of_many_levels_is_refused(tmp_path, line, levels):
    key = " .\t".join(PARTS[number % len(PARTS)] for number in range(levels))
    (tmp_path / "a.toml").write_text(line.format(key) + "\n")
    if levels < 32:
        assert files.toml(tmp_path / "a.toml")
        return
    with pytest.raises(ConfigError, match="a key of more than 32 levels"):
        files.toml(tmp_path / "a.toml")


def test_values_of_toml_may_have_many_dots(tmp_path):
    (tmp_path / "a.toml").write_text(
        f"a = [{', '.join(['0.5'] * 99)}]\nb = '{'.'.join('x' * 99)}'\n"
        f'c = "{"x." * 99}" # {"y." * 99}z'
    )
    assert len(files.toml(tmp_path / "a.toml")["a"]) == 99


LONG_CONFIGURATIONS = {
    "a key of many levels": ("toml", lambda n: ".".join("a" * n) + " = 1"),
    "levels of quotes": ("toml", lambda n: '"a".' * n + "a = 1"),
    "quotes that end nowhere": ("toml", lambda n: "a = '." + '\\"' * n),
    "a long word": ("toml", lambda n: "." * 40 + "a" * n),
    "words and blanks": ("toml", lambda n: "." * 40 + "a " * n),
    "dots": ("toml", lambda n: "a = '" + "." * n + "'"),
    "a number in base 60": ("yaml", lambda n: "a: " + ":".join("1" * n)),
    "a number": ("yaml", lambda n: "a: " + "1" * n),
}


@pytest.mark.parametrize("kind", LONG_CONFIGURATIONS)
def test_the_time_of_a_configuration_grows_with_its_length(tmp_path, kind):
    suffix, make = LONG_CONFIGURATIONS[kind]

    def written(count):
        path = tmp_path / f"a.{suffix}"
        path.write_text(make(count))
        return path

    def read(path):
        with suppress(ConfigError):
            (files.toml if suffix == "toml" else files.yaml)(path)

    assert growth(read, written, 20_000) < MOST
