"""Tables of operations with a mapping of their own."""

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

MAPPING = {
    "rank": "gpu",
    "start": "begin",
    "stop": "end",
    "unit": "us",
    "kind": "what",
    "iteration": "step",
    "stream": "stream",
    "bytes": "size",
    "group": "comm",
    "kinds": {
        "gemm*": "compute",
        "h2d": "copy",
        "reduce": {"op": "AllReduce", "tag": "DP"},
        "gather": "AllGather",
    },
}
ROWS = [
    {"gpu": 0, "begin": 0, "end": 40, "what": "gemm_a", "step": 7, "stream": 1},
    {"gpu": 0, "begin": 30, "end": 60, "what": "reduce", "step": 7, "stream": 2, "size": 3000},
    {"gpu": 1, "begin": 5, "end": 25, "what": "gather", "step": 7, "stream": 2, "size": 10},
    {"gpu": 0, "begin": 60, "end": 70, "what": "h2d", "step": 7, "stream": 3},
    {"gpu": 0, "begin": 100, "end": 110, "what": "gather", "step": 8, "stream": 2, "size": 10},
    {"gpu": 1, "begin": 30, "end": 62, "what": "reduce", "step": 7, "stream": 2, "size": 3000},
    {"gpu": 2, "begin": 31, "end": 63, "what": "gemm_b", "step": 7, "stream": 1},
]
for row in ROWS:
    row["comm"] = {"reduce": "world", "gather": "pair"}.get(row["what"])


def table(rows=None):
    return pa.Table.from_pylist(rows or ROWS, schema=SCHEMA)


SCHEMA = pa.schema(
    [
        ("gpu", "i4"),
        ("begin", "i8"),
        ("end", "i8"),
        ("what", "string"),
        ("step", "i4"),
        ("stream", "i4"),
        ("size", "i8"),
        ("comm", "string"),
    ]
)


def write(path, content):
    if path.name.endswith(".parquet"):
        pq.write_table(content, path, row_group_size=2)
    else:
        with pa.output_stream(path, compression="detect") as stream:
            pa_csv.write_csv(content, stream)
    return path
