"""A flight-recorder dump: reading it, and finding how its calls repeat themselves."""

import pickle

import numpy as np
from timing import best

from fastcomm.formats import flight_recorder
from fastcomm_kernels.repetitions import longest_repetition

CALLS = 2000
ROUNDS = 15
FRAMES = [{"name": f"layer{at}", "filename": "model.py", "line": at} for at in range(30)]


def test_recorder_dump(quotient, tmp_path):
    groups = [("0", "default_pg"), ("1", "tp"), ("2", "dp")]
    entries = [
        {
            "record_id": at,
            "pg_id": at % 3,
            "process_group": groups[at % 3],
            "collective_seq_id": at // 3,
            "p2p_seq_id": 0,
            "op_id": at,
            "profiling_name": ("nccl:all_reduce", "nccl:all_gather")[at % 2],
            "time_created_ns": 1_700_000_000_000_000_000 + at,
            "input_sizes": [[at % 7, 4096]],
            "output_sizes": [[at % 7, 4096]],
            "input_dtypes": ["BFloat16"],
            "output_dtypes": ["BFloat16"],
            "state": "completed",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": 1_700_000_000_000_000_000 + at,
            "retired": True,
            "timeout_ms": 600_000,
            "is_p2p": False,
            "frames": [FRAMES[(at + k) % 30] for k in range(10)],
        }
        for at in range(CALLS)
    ]
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}, 2))
    assert len(flight_recorder.read(path).calls) == CALLS  # compiles
    runs = (
        lambda: pickle.loads(path.read_bytes()),
        lambda: flight_recorder.read(path),
    )
    quotient("recorder_dump", lambda: best(*runs, rounds=ROUNDS))


def test_repetition(quotient):
    step = np.repeat(np.arange(40), 3)
    token = np.concatenate((np.tile(step, CALLS // len(step)), [99]))
    assert longest_repetition(token, 3)[0] == len(step)  # compiles

    def by_numpy():
        """Return the length of the longest run of equal calls, period by period."""
        longest = 0
        for period in range(1, len(token) - 3):
            differs = np.flatnonzero(token[period:] != token[:-period])
            ends = np.concatenate(([-1], differs, [len(token) - period]))
            longest = max(longest, int(np.diff(ends).max()) - 1)
        return longest

    runs = (by_numpy, lambda: longest_repetition(token, 3))
    quotient("repetition", lambda: best(*runs, rounds=ROUNDS))
