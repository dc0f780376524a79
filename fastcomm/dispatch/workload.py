"""Workloads of an expert all-to-all in files: Parquet, NumPy arrays, or a recipe."""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.dispatch import Recipe, id_type, layers_of_seed, source_gpus
from fastcomm.dispatch import layers as drawn_layers
from fastcomm.dispatch.traffic import Ids, LayerTokens
from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.files import aside
from fastcomm.options import WorkloadOptions

Numbers = NDArray[Any]

_DAMAGE = (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError)
_RECIPE_DAMAGE = (OSError, ValueError, TypeError, RecursionError, ConfigError)
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, TokenError, MemoryError, OverflowError)


def one(path: Path) -> Numbers:
    """Return the array of an .npy file."""
    with _errors(path), files.opened(path) as file:
        return _array(file, path.stat().st_size)


def several(path: Path, *wanted: tuple[str, ...]) -> tuple[Numbers, ...]:
    """Return the first array of an .npz file for each tuple of names in `wanted`."""
    with _errors(path), files.opened(path) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = [next((n for n in names if n in members), None) for names in wanted]
        if None in found:
            raise TraceFileError(
                f"{path}: found {', '.join(members) or 'nothing'}, wanted "
                f"{' and '.join(' or '.join(names) for names in wanted)}"
            )
        return tuple(_member(archive, members, name, path) for name in found if name)


def _member(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, path: Path
) -> Numbers:
    info = members[name]
    files.Limits.of_environment().check(info.file_size, info.compress_size, path)
    with archive.open(info) as stream:
        return _array(stream, info.file_size)


def _array(stream: IO[bytes], size: int) -> Numbers:
    """Return the array in a stream of `size` bytes; ValueError if it holds no whole numbers."""
    version = npy.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"npy version {version}, wanted 1.0 or 2.0")
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, kind = header(stream)
    if kind.kind not in "iu":
        raise ValueError(
            f"found {kind} {shape}, wanted whole numbers; no Python object is loaded"
        )
    wanted, left = prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or wanted > left:
        raise ValueError(f"its header says {shape} of {kind}, and {left} bytes follow")
    data = bytearray(stream.read(wanted))  # can be written to, as any array
    return np.frombuffer(data, kind).reshape(shape, order="F" if by_column else "C")


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGE, *_ZIP_DAMAGE) as error:
        words = getattr(error, "strerror", None) or error
        raise TraceFileError(f"{path}: no {path.suffix} of plain arrays: {words}") from error


_KEY = b"fastcomm.dispatch"
_SOURCES = ("src", "src_gpu")
_EXPERTS = ("expert", "target_experts", "topk_idx")
_GPUS = ("num_nodes", "gpus_per_node", "experts_per_gpu")
_NAME = re.compile(r"iter_(\d+)_requests\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A recipe, and the files of its iterations or the arrays of a table."""

    recipe: Recipe
    files: tuple[Path, ...] = ()
    arrays: tuple[tuple[Ids, Ids], ...] = ()
    made: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return a workload that is drawn as it is read, and stored nowhere."""
        return cls(recipe=recipe, made=True)

    def layers(self) -> Iterator[LayerTokens]:
        """Yield every layer, iteration by iteration; a file is read when its turn comes."""
        home = _home_gpus(self.recipe)
        for src, expert in self._pairs():
            yield LayerTokens(
                src, expert, home, self.recipe.num_nodes, self.recipe.gpus_per_node
            )

    def _pairs(self) -> Iterator[tuple[Ids, Ids]]:
        if self.made:
            yield from drawn(self.recipe)
        yield from self.arrays
        for path in self.files:
            yield from _read(path, self.recipe)


def _home_gpus(recipe: Recipe) -> NDArray[np.int32]:
    """Return the GPU of each expert."""
    return (np.arange(recipe.experts) // recipe.experts_per_gpu).astype(np.int32)


def drawn(recipe: Recipe, **more: Any) -> Iterator[tuple[Ids, Ids]]:
    """Yield the layers of a recipe; `more` are further arguments of `recipe.layers`."""
    if recipe.sampler == "seed":
        return layers_of_seed(recipe)
    if recipe.sampler == "table":
        raise ConfigError("sampler: `table` is a user's own routing, and draws nothing")
    return drawn_layers(recipe, **more)


def write(recipe: Recipe, folder: Path, **more: Any) -> list[Path]:
    """Draw a workload into a folder, a file an iteration; give their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if old := sorted(each.name for each in folder.glob("iter_*_requests.parquet")):
            raise ConfigError(f"{folder}: holds a workload already ({old[0]})")
        layers = drawn(recipe, **more)
        return [
            _write(folder / f"iter_{number}_requests.parquet", recipe, layers)
            for number in range(recipe.iter_num)
        ]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error


def _write(path: Path, recipe: Recipe, layers: Iterator[tuple[Ids, Ids]]) -> Path:
    kind = pa.from_numpy_dtype(id_type(recipe))
    schema = pa.schema(
        {"src": kind, "expert": pa.list_(kind, recipe.topk)},
        metadata={_KEY: json.dumps(recipe.to_dict()).encode()},
    )
    with (
        aside(path) as unfinished,
        arrow_files.writer(unfinished, schema, compression="zstd") as writer,
    ):
        for _ in range(recipe.num_layers):
            src, expert = next(layers)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(expert.ravel()), recipe.topk)
            writer.write_table(pa.table([pa.array(src), lists], schema=schema))
    return path


def open_workload(path: str | Path, options: WorkloadOptions | None = None) -> Workload:
    """Open a folder of `write`, or a table; `options` are what a user says of the shape.

    A shape that contradicts a generated workload is an error; a table has none of its own.
    """
    path, options = Path(path), options or WorkloadOptions()
    files = _files(path)
    if files[0].suffix in {".npz", ".npy"}:
        return _table(path, *_arrays(path, options), options)
    recipe = _recipe(files[0])
    if recipe is None:
        if len(files) > 1:
            raise TraceFileError(f"{files[0]}: no recipe of a workload in its metadata")
        return _table(path, *_columns(files[0]), options)
    for other in files[1:]:
        if _recipe(other) != recipe:
            raise TraceFileError(f"{other}: another workload's than {files[0].name}")
    if len(files) != recipe.iter_num:
        raise TraceFileError(
            f"{path}: found {len(files)} iterations, wanted the {recipe.iter_num} of its recipe"
        )
    return Workload(recipe=recipe.agreed(options, str(path)), files=files)


def _files(path: Path) -> tuple[Path, ...]:
    if path.exists() and not path.is_dir():
        return (path,)
    found = {
        int(match[1]): each
        for each in (path.iterdir() if path.is_dir() else ())
        if (match := _NAME.fullmatch(each.name))
    }
    if not found:
        raise TraceFileError(
            f"{path}: found no workload, wanted iter_0_requests.parquet and so on, or a file "
            ".npz, .npy or .parquet"
        )
    return tuple(found[number] for number in sorted(found))


def _recipe(path: Path) -> Recipe | None:
    try:
        files.check(path)
        with files.named(path) as source:
            said = (pq.read_schema(source).metadata or {}).get(_KEY)
        return None if said is None else Recipe.of(**json.loads(said))
    except (*_RECIPE_DAMAGE, pa.ArrowException) as error:
        raise TraceFileError(f"{path}: {error}") from error


def _read(path: Path, recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Yield the layers of a generated file."""
    src, expert = _columns(path)
    wanted = recipe.tokens * recipe.num_layers
    if len(src) != wanted or expert.shape[1] != recipe.topk:
        raise TraceFileError(
            f"{path}: found {len(src)} rows of {expert.shape[1]} experts, wanted {wanted} of "
            f"{recipe.topk}"
        )
    _check(path, src, expert, recipe)
    for number in range(recipe.num_layers):
        part = slice(number * recipe.tokens, (number + 1) * recipe.tokens)
        yield src[part], expert[part]


def _columns(path: Path) -> tuple[Ids, Ids]:
    try:
        table = arrow_files.read(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceFileError(f"{path}: {error}") from error
    src, expert = (
        next((name for name in names if name in table.column_names), None)
        for names in (_SOURCES, _EXPERTS)
    )
    if src is None or expert is None:
        raise TraceFileError(
            f"{path}: found columns {', '.join(table.column_names)}, wanted one of "
            f"{', '.join(_SOURCES)} and one of {', '.join(_EXPERTS)}"
        )
    return _ids(path, table, src), _lists(path, table, expert)


def _ids(path: Path, table: pa.Table, name: str) -> Ids:
    column = table[name].combine_chunks()
    if not pa.types.is_integer(column.type) or column.null_count:
        raise TraceFileError(f"{path}: column {name} is {column.type}, wanted whole numbers")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(path: Path, table: pa.Table, name: str) -> Ids:
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of an empty table
        column = pa.concat_arrays(column.chunks)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) or column.null_count:
        raise TraceFileError(f"{path}: column {name} is {kind}, wanted lists of experts")
    values = column.flatten()
    sizes = column.value_lengths().unique()
    if len(sizes) > 1 or not pa.types.is_integer(values.type) or values.null_count:
        raise TraceFileError(f"{path}: column {name}: wanted as many experts in every row")
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else 0
    width = sizes[0].as_py() if len(sizes) else size
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), width)


def _experts_alone(path: Path, expert: Ids, options: WorkloadOptions) -> tuple[Ids, Ids]:
    """Experts without sources: the tokens lie evenly on the GPUs, in order."""
    if expert.ndim not in {2, 3}:
        raise TraceFileError(f"{path}: found {expert.shape}, wanted [tokens, top-k]")
    given = options.given()
    shape = {name: given[name] for name in _GPUS if name in given}
    recipe = Recipe.of(**shape, seq_len=expert.shape[-2], batch_size=1, topk=1)
    return source_gpus(recipe), expert


def _arrays(path: Path, options: WorkloadOptions) -> tuple[Ids, Ids]:
    if path.suffix == ".npy":
        return _experts_alone(path, one(path), options)
    src, expert = several(path, _SOURCES, _EXPERTS)
    return src, expert


def _table(path: Path, src: Ids, expert: Ids, options: WorkloadOptions) -> Workload:
    """Return a user's own routing: experts [tokens, top-k] or [layers, tokens, top-k]."""
    if expert.ndim == 2:  # noqa: PLR2004  tokens by top-k
        expert = expert[None]
    tokens = expert.shape[1] if expert.ndim == 3 else -1  # noqa: PLR2004
    if tokens < 0 or src.shape not in {(tokens,), expert.shape[:2]}:
        raise TraceFileError(
            f"{path}: found sources {src.shape} and experts {expert.shape}, wanted [tokens] "
            "and [tokens, top-k]"
        )
    fixed = {
        "seq_len": tokens,
        "batch_size": 1,
        "topk": expert.shape[2],
        "num_layers": len(expert),
        "iter_num": 1,
        "sampler": "table",
    }
    given = options.given()
    for name, value in fixed.items():
        if name in given and given[name] != value:
            raise ConfigError(f"{path}: {name} is {value}, and {given[name]} was asked for")
    recipe = Recipe.of(**{**given, **fixed})
    _check(path, src, expert.reshape(-1, expert.shape[2]), recipe)
    dtype = id_type(recipe)
    every = np.broadcast_to(src, expert.shape[:2])
    pairs = [
        (np.ascontiguousarray(s, dtype), np.ascontiguousarray(e, dtype))
        for s, e in zip(every, expert, strict=True)
    ]
    return Workload(recipe=recipe, arrays=tuple(pairs))


def _check(path: Path, src: Ids, expert: Ids, recipe: Recipe) -> None:
    """Raise TraceFileError for a number that names no GPU or no expert."""
    for name, ids, count in (("GPU", src, recipe.gpus), ("expert", expert, recipe.experts)):
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= count):
            row = _first_row((ids < 0) | (ids >= count))
            raise TraceFileError(
                f"{path}: row {row}: found {name} {ids.flat[_first(ids, count)]}, wanted 0 to "
                f"{count - 1}; the shape is {recipe.num_nodes} nodes of {recipe.gpus_per_node} "
                f"GPUs with {recipe.experts_per_gpu} experts each"
            )


def _first_row(wrong: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])


def _first(ids: Ids, count: int) -> int:
    return int(np.flatnonzero((ids < 0) | (ids >= count))[0])
