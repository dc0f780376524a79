"""Read files about experts: measured loads (tokens of each expert by layer), and placements.

No file is trusted. Of loads, a text has numbers, a line per layer. A table, Parquet or CSV, has
the columns `layer`, `expert` and `tokens`, and `step` where loads of several steps are
recorded; what has no row has no token. A JSON document has `logical_count`, as SGLang takes it
with --init-expert-location (`srt/eplb/expert_location.py`): tokens by layer and expert, or by
step, layer and expert.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm import files
from fastcomm.checks import shortened
from fastcomm.dispatch.options import MOST_EXPERTS, MOST_LAYERS
from fastcomm.dispatch.placement import Loads, Placement
from fastcomm.errors import ConfigError, FastcommError

StepLoads = NDArray[np.float64]  # shape (steps, layers, experts)
_LARGEST = 1 << 28  # bytes of a text
_MOST_CELLS = 1 << 26
_MOST_STEPS = 1 << 20
_MOST_TOKENS = 1e18
_COLUMNS = ("layer", "expert", "tokens")
_AXES = (("step", _MOST_STEPS), ("layer", MOST_LAYERS), ("expert", MOST_EXPERTS))
_COUNT = "logical_count"
_NDIM = (2, 3)  # layers and experts, with or without steps
# What vLLM logs of its balancer: the mean and the largest load of a rank.
_VLLM = re.compile(r"\bbalancedness=")


def read_loads(path: Path, layers: int, experts: int) -> StepLoads:
    """Read the measured loads of experts.

    Parameters
    ----------
    path
        A text, CSV, Parquet or JSON file.
    layers, experts
        Numbers of layers, and of experts of a layer.

    Returns
    -------
    ndarray
        Tokens, shape (steps, layers, experts).

    Raises
    ------
    ConfigError
        If the file cannot be read, or has loads of other layers or experts.

    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        loads = _of_rows(_parquet(path), path)
    elif suffix == ".csv":
        loads = _of_rows(_csv(path), path)
    elif suffix == ".json":
        loads = _of_json(path)
    elif suffix in {".pt", ".pth", ".pkl", ".safetensors"}:
        raise ConfigError(
            f"{path}: files of PyTorch may run code when they are read; write counts as JSON: "
            'json.dump({"logical_count": torch.load(path)["logical_count"].tolist()}, file)'
        )
    else:
        loads = _of_text(path, layers)
    if suffix in {".parquet", ".csv"} and loads.shape[2] < experts:
        # What has no row has no token, also the last experts.
        loads = np.pad(loads, ((0, 0), (0, 0), (0, experts - loads.shape[2])))
    return _checked(loads, path, layers, experts)


def _checked(loads: NDArray[Any], path: Path, layers: int, experts: int) -> StepLoads:
    """Return loads of all layers and experts; one layer without others stands for each."""
    if not np.isfinite(loads).all() or (loads < 0).any() or (loads > _MOST_TOKENS).any():
        raise ConfigError(f"{path}: a load is below 0, or no number up to {_MOST_TOKENS:.0e}")
    if loads.shape[2] != experts:
        raise ConfigError(
            f"{path}: loads of {loads.shape[2]} experts, but a layer has {experts} experts"
        )
    if loads.shape[1] != layers:
        # Recorders count dense layers, too: they have no tokens.
        used = loads.any(axis=(0, 2))
        if int(used.sum()) != layers:
            raise ConfigError(
                f"{path}: loads of {loads.shape[1]} layers, {int(used.sum())} of them with "
                f"tokens, but the workload has {layers}"
            )
        loads = loads[:, used]
    loads = loads[loads.any(axis=(1, 2))]
    if not len(loads):
        raise ConfigError(f"{path}: no expert has a token")
    return loads


def _of_text(path: Path, layers: int) -> StepLoads:
    """Return the numbers of a text, which spaces, lines or commas separate."""
    text = files.text(path, _LARGEST)
    if _VLLM.search(text):
        raise ConfigError(
            f"{path}: vLLM's log has the balance of ranks, and not the load of experts; write "
            "a table of layer, expert and tokens, from its expert_load_pass"
        )
    try:
        numbers = [float(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; the file may have only numbers") from error
    if not numbers or len(numbers) % layers:
        raise ConfigError(
            f"{path}: {len(numbers)} numbers are not a line for each of {layers} layers"
        )
    return np.reshape(numbers, (1, layers, -1))


def _parquet(path: Path) -> Mapping[str, Sequence[Any]]:
    import pyarrow as pa

    from fastcomm import arrow_files

    try:
        table = arrow_files.read(path)
        names = [name for name in table.column_names if name in ("step", *_COLUMNS)]
        columns: dict[str, Sequence[Any]] = {
            name: table[name].cast(pa.float64(), safe=False).to_pylist() for name in names
        }
    except (pa.ArrowException, OSError, FastcommError, NotImplementedError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return columns


def _csv(path: Path) -> Mapping[str, Sequence[Any]]:
    try:
        reader = csv.DictReader(io.StringIO(files.text(path, _LARGEST), newline=""))
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}") from error
    if twice := [name for name in ("step", *_COLUMNS) if names.count(name) > 1]:
        raise ConfigError(f"{path}: column {twice[0]} is there twice")
    return {name: [row[name] for row in rows] for name in ("step", *_COLUMNS) if name in names}


def _of_rows(columns: Mapping[str, Sequence[Any]], path: Path) -> StepLoads:
    """Return the loads of a table with a row per layer and expert, maybe of several steps."""
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise ConfigError(
            f"{path}: no column {', '.join(missing)}; needed are {', '.join(_COLUMNS)}"
        )
    tokens = _numbers(columns["tokens"], path, "tokens")
    if not len(tokens):
        raise ConfigError(f"{path}: no rows")
    if (wrong := np.flatnonzero(~((tokens >= 0) & (tokens <= _MOST_TOKENS)))).size:
        raise ConfigError(
            f"{path}, row {wrong[0] + 1}: tokens is {tokens[wrong[0]]:g}; expected a number "
            f"from 0 to {_MOST_TOKENS:.0e}"
        )
    places = []
    for name, most in _AXES:
        values = _numbers(columns.get(name, [0] * len(tokens)), path, name)
        if (values != np.floor(values)).any() or not ((values >= 0) & (values < most)).all():
            raise ConfigError(f"{path}: column {name}: expected whole numbers from 0")
        places.append(values.astype(np.int64))
    # Numbers of steps need not be consecutive.
    places[0] = np.unique(places[0], return_inverse=True)[1].reshape(-1)
    shape = tuple(int(place.max()) + 1 for place in places)
    if np.prod([float(size) for size in shape]) > _MOST_CELLS:
        raise ConfigError(f"{path}: {' x '.join(map(str, shape))} loads are too many")
    loads = np.zeros(shape)
    np.add.at(loads, tuple(places), tokens)
    return loads


def _numbers(values: Sequence[Any], path: Path, name: str) -> Loads:
    numbers = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            numbers[row] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            text = "nothing" if value in (None, "") else shortened(value)
            raise ConfigError(
                f"{path}, row {row + 1}: {name} is {text}; expected a number"
            ) from error
    return numbers


def _of_json(path: Path) -> StepLoads:
    """Return the counts of a JSON document."""
    document = files.json(path)
    counts = document.get(_COUNT) if isinstance(document, dict) else document
    if counts is None:
        raise ConfigError(f"{path}: no key {_COUNT}, as SGLang writes tokens of experts")
    try:
        kind = np.array(counts).dtype.kind
        loads = np.array(counts, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {_COUNT}: not lists of equally many numbers") from error
    if kind in "bSU":
        raise ConfigError(f"{path}: {_COUNT} has texts or true and false; expected numbers")
    if loads.ndim not in _NDIM or not loads.size:
        raise ConfigError(
            f"{path}: {_COUNT} has shape {loads.shape}; expected [layers, experts] or "
            "[steps, layers, experts]"
        )
    return loads.reshape(-1, *loads.shape[-2:])


def read_placements(path: Path, layers: int, experts: int, gpus: int) -> tuple[Placement, ...]:
    """Read placements: `physical_to_logical` of each layer, as `dispatch place --json` has it.

    SGLang's `physical_to_logical_map`, a list per layer, is read as well.

    Raises
    ------
    ConfigError
        If the file cannot be read, or has other layers, experts or GPUs.

    """
    document = files.json(path)
    rows: Any = None
    if isinstance(document, dict):
        rows = document.get("physical_to_logical_map")
        if rows is None and isinstance(document.get("layers"), list):
            own = [layer for layer in document["layers"] if isinstance(layer, dict)]
            rows = [layer.get("physical_to_logical") for layer in own]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(
            f"{path}: no layers with physical_to_logical, as `fastcomm dispatch place --json` "
            "writes, and no physical_to_logical_map"
        )
    if len(rows) != layers:
        raise ConfigError(f"{path}: {len(rows)} layers, but the workload has {layers}")
    for number, row in enumerate(rows):
        _check_row(row, f"{path}: layer {number}", experts, gpus)
    return tuple(
        Placement(logical=np.array(row, np.int64), experts=experts, gpus=gpus) for row in rows
    )


def _check_row(row: list[Any], where: str, experts: int, gpus: int) -> None:
    """Raise `ConfigError` unless a row has every expert, and equally many for each GPU."""
    bad = [one for one in row if type(one) is not int or not 0 <= one < experts]
    if bad:
        raise ConfigError(
            f"{where}: {shortened(bad[0])} is not an expert from 0 to {experts - 1}"
        )
    if len(row) % gpus or set(row) != set(range(experts)):
        raise ConfigError(
            f"{where}: {len(row)} replicas; expected all {experts} experts, and equally many "
            f"on each of {gpus} GPUs"
        )
