"""CSV files of training runs and of model shapes, as people and spreadsheets write them.

Fields are separated by commas, semicolons or tabs; the text is UTF-8, or UTF-16 with a byte
order mark. Names of columns are compared in lower case, without spaces around them.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastcomm import files
from fastcomm.checks import shortened
from fastcomm.errors import ConfigError
from fastcomm.isp.model import VOCAB, Experts, Latent, Model
from fastcomm.isp.presets import PRESETS, checked
from fastcomm.units import parse_quantity

_LARGEST = 64 << 20  # bytes of a table
_MOST_ROWS = 100_000
_DELIMITERS = ",;\t"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table: the line where it ends, its values by column, and what is wrong."""

    line: int
    values: Mapping[str, str]
    problem: str = ""


def read_table(path: Path, required: tuple[str, ...]) -> list[TableRow]:
    """Return the rows of a CSV file with a header; empty rows are left out.

    Raises
    ------
    ConfigError
        If a required column is missing, a column is repeated, or there is no row.

    """
    text = files.text(path, _LARGEST)
    first = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        lines = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    if len(lines) < 2:  # noqa: PLR2004 the header and a run
        raise ConfigError(f"{path}: no rows; expected a header and one row a line")
    if len(lines) > _MOST_ROWS:
        raise ConfigError(f"{path}: more than {_MOST_ROWS} rows")
    names = [_column(name) for name in lines[0][1]]
    _check_columns(path, names, required)
    return list(_rows(names, lines[1:]))


def _column(name: str) -> str:
    """Return the name of a column as this package writes it."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _check_columns(path: Path, names: list[str], required: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a column is missing or repeated."""
    if missing := [name for name in required if name not in names]:
        raise ConfigError(
            f"{path}: missing column {', '.join(missing)}; needed are {', '.join(required)}; "
            f"found {shortened(', '.join(names))}"
        )
    if repeated := sorted({name for name in names if name and names.count(name) > 1}):
        raise ConfigError(f"{path}: repeated column {', '.join(repeated)}")


def _rows(names: list[str], lines: list[tuple[int, list[str]]]) -> Iterator[TableRow]:
    for line, fields in lines:
        values = {name: field.strip() for name, field in zip(names, fields, strict=False)}
        problem = ""
        if len(fields) != len(names):
            problem = f"expected {len(names)} fields, as the header has, found {len(fields)}"
        yield TableRow(line=line, values=values, problem=problem)


def load_models(path: Path) -> dict[str, Model]:
    """Return the models of a table by name.

    Raises
    ------
    ConfigError
        If a column is missing, a number is invalid, or a model is repeated.

    """
    rows = read_table(path, ("name", "layers", "hidden", "heads", "ffn", "vocab"))
    models: dict[str, Model] = {}
    for row in rows:
        where = f"{path}, line {row.line}"
        if row.problem:
            raise ConfigError(f"{where}: {row.problem}")
        name = row.values["name"]
        if name in models:
            raise ConfigError(f"{where}: model {shortened(name)} is repeated")
        models[name] = checked(_model(row.values, f"{where}: {shortened(name)}"), path)
    return models


def _model(row: Mapping[str, str], where: str) -> Model:
    def number(name: str, default: int = 0) -> int:
        text = row.get(name, "")
        return parse_quantity(text, f"{where}: {name}") if text not in {"", "0"} else default

    hidden, heads = number("hidden", 1), number("heads", 1)
    width = number("head_dim")
    latent = None
    if number("kv_lora"):
        names = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
        parts = ("q_rank", "kv_rank", "nope", "rope", "value")
        latent = Latent(**{p: number(n, 1) for p, n in zip(parts, names, strict=True)})
    experts = None
    if number("experts"):
        experts = Experts(
            number=number("experts"),
            top_k=number("topk", 1),
            ffn=number("expert_ffn", number("ffn", 1)),
            shared=number("shared_ffn"),
            dense_layers=number("dense_layers"),
            node_limit=number("node_limit", _node_limit(row["name"])),
        )
    window = row.get("sliding_window", "").partition(" ")[0]
    return Model(
        name=row["name"],
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        layers=number("layers", 1),
        ffn=number("ffn", 4 * hidden),
        vocab=number("vocab", VOCAB),
        mlp="swiglu" if row.get("mlp", "swiglu") in {"swiglu", "geglu", ""} else "gelu",
        head_dim=0 if latent or width * heads == hidden else width,
        latent=latent,
        experts=experts,
        tied=row.get("tied", "") in {"1", "true", "yes"},
        mtp_layers=number("mtp_layers"),
        window=int(window) if window.isdecimal() else 0,
    )


def _node_limit(name: str) -> int:
    """Return the most nodes that a token may visit in the preset of a name; 0 is no limit."""
    preset = PRESETS.get(name.lower())
    return preset.experts.node_limit if preset and preset.experts else 0
