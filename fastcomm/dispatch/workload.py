"""Read and write workloads of an expert all-to-all: Parquet, NumPy arrays, or a recipe.

No file is trusted.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from fastcomm.checks import check_path, check_type, option_name
from fastcomm.dispatch.options import WorkloadOptions
from fastcomm.dispatch.placement import RULES, Placement, at_replicas
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.routing import draw, id_type, source_gpus
from fastcomm.dispatch.traffic import LayerTokens
from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.files import aside
from fastcomm.option_fields import build
from fastcomm.units import enumeration
from fastcomm_kernels.arrays import Ids

_DAMAGE = (OSError, ValueError, TypeError, RecursionError, ConfigError)
_KEY = b"fastcomm.dispatch"
_SOURCES = ("src", "src_gpu")
_EXPERTS = ("expert", "target_experts", "topk_idx")
_GPUS = ("num_nodes", "gpus_per_node", "experts_per_gpu")
_NAME = re.compile(r"iter_(\d+)_requests\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tokens and experts of every layer: drawn from a recipe, from files, or in memory."""

    recipe: Recipe
    files: tuple[Path, ...] = ()  # one per iteration
    arrays: tuple[tuple[Ids, Ids], ...] = ()  # source GPU and experts of each layer
    is_drawn: bool = False  # whether layers are drawn from the recipe
    placements: tuple[Placement, ...] = ()  # of each layer; none: expert e is in order
    rule: str = RULES[0]  # how a token chooses among the replicas of its expert

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return a workload that is drawn from a recipe each time it is read."""
        example = "a recipe, as in Workload.of(Recipe.of(num_nodes=2))"
        check_type(recipe, Recipe, "Workload.of: recipe", example)
        return cls(recipe=recipe, is_drawn=True)

    def placed(self, placements: Sequence[Placement], rule: str) -> Self:
        """Return the workload with the experts of each layer on other GPUs.

        Raises `ConfigError` unless `rule` is one of `placement.RULES`.
        """
        if rule not in RULES:
            raise ConfigError(f"invalid rule {rule!r}: expected one of {', '.join(RULES)}")
        return replace(self, placements=tuple(placements), rule=rule)

    def layers(self) -> Iterator[LayerTokens]:
        """Yield every layer, iteration by iteration; files are read one at a time.

        The experts are replicas, if the workload is placed.

        Raises `TraceFileError` if a file is damaged or does not fit the recipe.
        """
        layers = self._layers_in_order()
        if not self.placements:
            return layers
        return at_replicas(layers, self.placements, self.rule, self.recipe)

    def _layers_in_order(self) -> Iterator[LayerTokens]:
        """Yield every layer with expert e on GPU e // experts_per_gpu."""
        recipe = self.recipe
        home = (np.arange(recipe.experts) // recipe.experts_per_gpu).astype(np.int32)
        for src, expert in self._pairs():
            yield LayerTokens(src, expert, home, recipe.num_nodes, recipe.gpus_per_node)

    def _pairs(self) -> Iterator[tuple[Ids, Ids]]:
        """Yield tokens and experts per layer: drawn ones, then arrays, then files."""
        if self.is_drawn:
            yield from draw(self.recipe)
        yield from self.arrays
        for path in self.files:
            yield from _read(path, self.recipe)


def write(
    recipe: Recipe,
    folder: Path,
    *,
    popularity: Sequence[float] | None = None,
    sources: Sequence[int] | None = None,
    threads: int = 1,
) -> list[Path]:
    """Draw a workload, write one Parquet file per iteration, and return the paths.

    `popularity` is the weight of each expert, `sources` the tokens of each GPU, and `threads`
    the number of threads.

    Raises
    ------
    ConfigError
        If the folder has a workload already or cannot be written, or the recipe cannot be
        drawn.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if old := sorted(file.name for file in folder.glob("iter_*_requests.parquet")):
            raise ConfigError(
                f"{folder}: already has a workload ({old[0]}); choose another folder"
            )
        layers = draw(recipe, popularity=popularity, sources=sources, threads=threads)
        return [
            _write(folder / f"iter_{number}_requests.parquet", recipe, layers)
            for number in range(recipe.iter_num)
        ]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error


def _write(path: Path, recipe: Recipe, layers: Iterator[tuple[Ids, Ids]]) -> Path:
    """Write the next iteration of `layers` to a Parquet file, with the recipe as metadata.

    A layer is the source GPU and the experts of each token.
    """
    kind = pa.from_numpy_dtype(id_type(recipe.experts))
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
    """Open a workload that `write` generated, or a table of routing.

    Parameters
    ----------
    path
        Folder of a generated workload, or a file: .npz, .npy or .parquet.
    options
        Shape of the cluster and the model, which a table does not contain. It may not
        contradict that of a generated workload.

    Raises
    ------
    TraceFileError
        If a file cannot be read, or files are missing.
    ConfigError
        If the options contradict the workload.

    """
    check_path(path, "open_workload: path", 'open_workload("traffic/")')
    path, options = Path(path), WorkloadOptions() if options is None else options
    check_type(options, WorkloadOptions, "open_workload: options", "WorkloadOptions")
    files = _files(path)
    if files[0].suffix in {".npz", ".npy"}:
        return _table(path, *_arrays(path, options), options)
    recipe = _recipe(files[0])
    if recipe is None:
        if len(files) > 1:
            raise TraceFileError(f"{files[0]}: no workload recipe in its metadata")
        return _table(path, *_columns(files[0]), options)
    for other in files[1:]:
        if _recipe(other) != recipe:
            raise TraceFileError(f"{other}: belongs to another workload than {files[0].name}")
    if len(files) != recipe.iter_num:
        raise TraceFileError(
            f"{path}: {len(files)} iterations, but its recipe has {recipe.iter_num}"
        )
    return Workload(recipe=recipe.check_options(options, str(path)), files=files)


def _files(path: Path) -> tuple[Path, ...]:
    """Return the file itself, or the files of a folder in the order of iterations."""
    if path.exists() and not path.is_dir():
        return (path,)
    by_number = {
        int(match[1]): file
        for file in (path.iterdir() if path.is_dir() else ())
        if (match := _NAME.fullmatch(file.name))
    }
    if not by_number:
        raise TraceFileError(
            f"{path}: no workload; expected a folder with iter_0_requests.parquet and so on, "
            "or a file .npz, .npy or .parquet"
        )
    return tuple(by_number[number] for number in sorted(by_number))


def _recipe(path: Path) -> Recipe | None:
    """Return the recipe in the metadata of a Parquet file; None without one."""
    try:
        files.check(path)
        with files.named(path) as source:
            text = (pq.read_schema(source).metadata or {}).get(_KEY)
        return None if text is None else build(Recipe, json.loads(text), "recipe")
    except (*_DAMAGE, pa.ArrowException) as error:
        raise TraceFileError(f"{path}: {error}") from error


def _read(path: Path, recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Yield the layers of a generated file."""
    src, expert = _columns(path)
    expected = recipe.tokens * recipe.num_layers
    if len(src) != expected or expert.shape[1] != recipe.topk:
        raise TraceFileError(
            f"{path}: {len(src)} rows of {expert.shape[1]} experts, but its recipe has "
            f"{expected} rows of {recipe.topk}"
        )
    _check(path, src, expert, recipe)
    for number in range(recipe.num_layers):
        part = slice(number * recipe.tokens, (number + 1) * recipe.tokens)
        yield src[part], expert[part]


def _columns(path: Path) -> tuple[Ids, Ids]:
    """Return sources and experts of a Parquet file."""
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
            f"{path}: it has columns {', '.join(table.column_names)}; expected one of "
            f"{', '.join(_SOURCES)} and one of {', '.join(_EXPERTS)}"
        )
    return _ids(path, table, src), _lists(path, table, expert)


def _ids(path: Path, table: pa.Table, name: str) -> Ids:
    """Return an integer column as an array."""
    column = table[name].combine_chunks()
    if not pa.types.is_integer(column.type) or column.null_count:
        raise TraceFileError(
            f"{path}: column {name} is {column.type}; expected whole numbers without nulls"
        )
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(path: Path, table: pa.Table, name: str) -> Ids:
    """Return a column of lists of equal length as an array of two dimensions."""
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of an empty table
        column = pa.concat_arrays(column.chunks)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) or column.null_count:
        raise TraceFileError(
            f"{path}: column {name} is {kind}; expected lists of experts without nulls"
        )
    values = column.flatten()
    sizes = column.value_lengths().unique()
    if len(sizes) > 1 or not pa.types.is_integer(values.type) or values.null_count:
        raise TraceFileError(
            f"{path}: column {name}: expected the same number of experts in every row"
        )
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else 0
    width = sizes[0].as_py() if len(sizes) else size
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), width)


def _experts_alone(path: Path, expert: Ids, options: WorkloadOptions) -> tuple[Ids, Ids]:
    """Return sources and experts of a table without sources: tokens are spread evenly."""
    if expert.ndim not in {2, 3}:
        raise TraceFileError(f"{path}: shape {expert.shape}; expected [tokens, top-k]")
    values = _cluster_shape(path, options)
    shape = {name: values[name] for name in _GPUS}
    recipe = Recipe.of(**shape, seq_len=expert.shape[-2], batch_size=1, topk=1)
    return source_gpus(recipe), expert


def _cluster_shape(path: Path, options: WorkloadOptions) -> dict[str, Any]:
    """Return the values of the options; ConfigError if they lack the cluster's shape."""
    values = options.recipe_values()
    if missing := [name for name in _GPUS if name not in values]:
        raise ConfigError(
            f"{path}: a routing table does not say the shape of the cluster; add "
            f"{enumeration([option_name(name) for name in missing])}"
        )
    return values


def _arrays(path: Path, options: WorkloadOptions) -> tuple[Ids, Ids]:
    """Return sources and experts of an .npy or .npz file."""
    if path.suffix == ".npy":
        return _experts_alone(path, read_npy(path), options)
    src, expert = read_npz(path, _SOURCES, _EXPERTS)
    return src, expert


def _table(path: Path, src: Ids, expert: Ids, options: WorkloadOptions) -> Workload:
    """Return a workload of experts [tokens, top-k] or [layers, tokens, top-k]."""
    if expert.ndim == 2:  # noqa: PLR2004  tokens by top-k
        expert = expert[None]
    tokens = expert.shape[1] if expert.ndim == 3 else -1  # noqa: PLR2004
    if tokens < 0 or src.shape not in {(tokens,), expert.shape[:2]}:
        raise TraceFileError(
            f"{path}: sources {src.shape} and experts {expert.shape}; expected [tokens] and "
            "[tokens, top-k]"
        )
    fixed = {
        "seq_len": tokens,
        "batch_size": 1,
        "topk": expert.shape[2],
        "num_layers": len(expert),
        "iter_num": 1,
        "law": "table",
    }
    values = _cluster_shape(path, options)
    for name, value in fixed.items():
        if name in values and values[name] != value:
            raise ConfigError(f"{path}: {name} is {value}, but the option says {values[name]}")
    recipe = Recipe.of(**{**values, **fixed})
    _check(path, src, expert.reshape(-1, expert.shape[2]), recipe)
    dtype = id_type(recipe.experts)
    sources = np.broadcast_to(src, expert.shape[:2])
    pairs = [
        (np.ascontiguousarray(s, dtype), np.ascontiguousarray(e, dtype))
        for s, e in zip(sources, expert, strict=True)
    ]
    return Workload(recipe=recipe, arrays=tuple(pairs))


def _check(path: Path, src: Ids, expert: Ids, recipe: Recipe) -> None:
    """Raise TraceFileError for a number that is not a GPU or an expert of the recipe."""
    for name, ids, count in (("GPU", src, recipe.gpus), ("expert", expert, recipe.experts)):
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= count):
            first = int(np.flatnonzero((ids < 0) | (ids >= count))[0])
            raise TraceFileError(
                f"{path}: row {first * len(ids) // ids.size}: {name} {ids.flat[first]} is not "
                f"in 0 to {count - 1}; the cluster has {recipe.num_nodes} nodes of "
                f"{recipe.gpus_per_node} GPUs with {recipe.experts_per_gpu} experts each"
            )


IntegerArray = NDArray[Any]
_MOST_NAMED = 8
_ARRAY_DAMAGE = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, TokenError, MemoryError, OverflowError),
)


def read_npy(path: Path) -> IntegerArray:
    """Return the array of an .npy file; TraceFileError unless it has plain integers."""
    with _trace_file_errors(path), files.opened(path) as file:
        return _array(file, path.stat().st_size)


def read_npz(path: Path, *aliases: tuple[str, ...]) -> tuple[IntegerArray, ...]:
    """Return arrays of an .npz file, each by the first of its names that the file has.

    Raises
    ------
    TraceFileError
        If the file has no array of some names, or an array has other values than integers.

    """
    with (
        _trace_file_errors(path),
        files.opened(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        present = [next((n for n in names if n in members), None) for names in aliases]
        if None in present:
            raise TraceFileError(
                f"{path}: expected arrays {' and '.join(' or '.join(n) for n in aliases)}; "
                f"found {_names(list(members))}"
            )
        return tuple(_member(archive, members, name, path) for name in present if name)


def _names(arrays: Sequence[str]) -> str:
    """Return the first names of the arrays of a file, and how many more there are."""
    more = f" and {len(arrays) - _MOST_NAMED} more" if len(arrays) > _MOST_NAMED else ""
    return f"{', '.join(arrays[:_MOST_NAMED]) or 'none'}{more}"


def _member(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, path: Path
) -> IntegerArray:
    """Read the array of a member of an .npz file; refuse sizes above the limits."""
    info = members[name]
    files.Limits.of_environment().check(info.file_size, info.compress_size, path)
    with archive.open(info) as stream:
        return _array(stream, info.file_size)


def _array(stream: IO[bytes], size: int) -> IntegerArray:
    """Return the array in a stream of `size` bytes; ValueError unless it has integers."""
    version = npy.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"npy version {version} is not supported; expected 1.0 or 2.0")
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, kind = header(stream)
    if kind.kind not in "iu":
        raise ValueError(
            f"expected whole numbers, not {kind} {shape}; Python objects are not loaded"
        )
    needed, remaining = prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or needed > remaining:
        raise ValueError(f"its header declares {shape} of {kind}, but {remaining} bytes follow")
    data = bytearray(stream.read(needed))  # a bytearray, so that the array is writable
    return np.frombuffer(data, kind).reshape(shape, order="F" if is_fortran else "C")


@contextmanager
def _trace_file_errors(path: Path) -> Iterator[None]:
    """Convert errors of damaged files to TraceFileError."""
    try:
        yield
    except _ARRAY_DAMAGE as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceFileError(
            f"{path}: cannot read a plain array from {path.suffix}: {reason}"
        ) from error
