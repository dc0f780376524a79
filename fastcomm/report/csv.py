"""A table as CSV, which a spreadsheet opens without running anything."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

# A spreadsheet takes a text that begins so for a formula, unless it is a number.
_FORMULA, _NUMBER = r"^[=+\-@\t\r]", r"^[+-]?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?$"


def write(table: pa.Table, path: Path) -> None:
    """Write it: lists become words, and a text that would be a formula gets a ' before it."""
    for place, field in enumerate(table.schema):
        table = table.set_column(place, field.name, _plain(table[field.name]))
    pa_csv.write_csv(table, path)


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
    is_formula = pc.and_not(
        pc.match_substring_regex(column, _FORMULA), pc.match_substring_regex(column, _NUMBER)
    )
    quoted = pc.binary_join_element_wise("'", column, "")
    return pc.if_else(is_formula, quoted.cast(column.type), column)
