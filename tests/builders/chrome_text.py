"""The text of a small trace."""

from builders.chrome_files import agrees, found
from numba.core import config
from oracles.chrome import is_wanted, loads, record

INTERPRETED = bool(config.DISABLE_JIT)


EVENTS = [
    """{
    "ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "pid": 10, "tid": 11,
    "ts": 100.500, "dur": 30.250,
    "args": {
      "External id": 5, "dtype": "Float", "Seq": 3, "Input Dims": [[2, 3], []]
    }
  }""",
    """{
    "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7,
    "ts": 140.001, "dur": 9.999,
    "args": {
      "stream": 7, "correlation": 41, "grid": [1, 1, 1], "Process Group Name": "0"
    }
  }""",
    """{
    "ph": "f", "id": 41, "pid": 0, "tid": 7, "ts": 140.001, "cat": "ac2g", "name": "ac2g"
  }""",
    """{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 10, "tid": 11,
    "ts": 120.000, "dur": 2.000, "args": { "correlation": 41 }
  }""",
]


HEAD = """{
  "schemaVersion": 1,
  "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
  "traceEvents": [
  """


TAIL = """
  ],
  "INFO": ["line [1]"],
  "traceName": "x.json",
  "baseTimeNanoseconds": 1700000000000000000
}
"""


FILLER = '{"ph": "i", "name": "x"}'


def trace(*listed, head=HEAD, tail=TAIL, filler=0):
    return (head + ",\n  ".join([*listed, *[FILLER] * filler]) + tail).encode()


def expected_of(*listed):
    return [
        record(event) for event in loads(f"[{', '.join(listed)}]".encode()) if is_wanted(event)
    ]


def assert_rows(scanned, wanted):
    rows, _ = found(scanned)
    assert len(rows) == len(wanted)
    assert all(map(agrees, rows, wanted))
