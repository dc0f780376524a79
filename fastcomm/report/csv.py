"""A table as CSV, which a spreadsheet opens without running anything."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from fastcomm.inert import inert

# What `inert` may change: control and format characters, and the separators of lines.
_ACTIVE = r"[\pC\p{Zl}\p{Zp}]"
# A spreadsheet takes a text that begins so for a formula, unless it is a number: with a sign,
# or with the full-width one of East Asian keyboards, also behind spaces.
_FORMULA = r"^[\s\p{Zs}]*[=+\-@\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}]"
_NUMBER = r"^[+-]?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?$"


def write(table: pa.Table, path: Path) -> None:
    r"""Write a table: lists become words, and no text does anything in a spreadsheet.

    Line breaks and control characters are written as in messages (`\n`), so that each row is a
    line; a text that would be a formula gets a ' before it.
    """
    for place, field in enumerate(table.schema):
        table = table.set_column(place, field.name, _plain(table[field.name]))
    with pa.OSFile(os.fsencode(path), "wb") as file:
        pa_csv.write_csv(table, file)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_list(column.type):
        words = [
            None if value is None else " ".join(map(str, value)) for value in column.to_pylist()
        ]
        column = pa.chunked_array([pa.array(words, pa.string())])
    elif pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    if pc.any(pc.match_substring_regex(column, _ACTIVE)).as_py():
        texts = [each and inert(each) for each in column.to_pylist()]
        column = pa.chunked_array([pa.array(texts, column.type)])
    is_formula = pc.and_not(
        pc.match_substring_regex(column, _FORMULA), pc.match_substring_regex(column, _NUMBER)
    )
    quoted = pc.binary_join_element_wise("'", column, "")
    return pc.if_else(is_formula, quoted.cast(column.type), column)
