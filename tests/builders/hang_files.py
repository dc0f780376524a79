"""Made-up dumps of a job in groups of four, and what RAS and watchdogs write beside them."""

import gzip
import json

from fastcomm.formats.flight_recorder import read
from fastcomm.hang.calls import of_dump

OPS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
TP = 4
_START = 1_700_000_000  # s
STACK = """\
Thread 0x00007f (most recent call first):
  File "train.py", line 210 in __getitem__
  File "lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 673 in _next_data
  File "train.py", line 48 in <module>
"""


def groups_of(world):
    """The groups of a job: all ranks, and four neighbors each."""
    of_four = {
        f"{1 + first // TP}": ("mesh_tp", list(range(first, first + TP)))
        for first in range(0, world, TP)
    }
    return {"0": ("default_pg", list(range(world))), **of_four}


def _call(record, rank, name, desc, number, done):
    return {
        "record_id": record,
        "pg_id": int(name != "0"),
        "process_group": [name, desc],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": (_START + record) * 1_000_000_000 + rank,
        "input_sizes": [[64]],
        "output_sizes": [[64]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "is_p2p": False,
        "timeout_ms": 600_000,
    }


def dump_of(rank, world, steps, absent=None):
    """The dump of a rank: all steps are done, and its part of one more is open.

    A step is a collective of four, and one of all. `absent` is the rank that never comes to the
    next step; it has nothing open.
    """
    own = f"{1 + rank // TP}"
    calls = []
    for step in range(1, steps + 1):
        calls.append(_call(len(calls), rank, own, "mesh_tp", step, True))
        calls.append(_call(len(calls), rank, "0", "default_pg", step, True))
    if rank != absent:
        is_stuck = absent is not None and rank // TP == absent // TP
        calls.append(_call(len(calls), rank, own, "mesh_tp", steps + 1, not is_stuck))
        if not is_stuck:
            calls.append(_call(len(calls), rank, "0", "default_pg", steps + 1, False))
    config = {
        name: {"name": name, "desc": desc, "ranks": str(ranks)}
        for name, (desc, ranks) in groups_of(world).items()
        if rank in ranks
    }
    return {"version": "2.10", "pg_config": config, "entries": calls}


def calls_of(folder, rank, document):
    """The calls of a dump that is written into a folder."""
    path = folder / f"rank_{rank}"
    path.write_text(json.dumps(document))
    return of_dump(read(path))


def write_dumps(folder, world, *, absent=None, without=(), steps=3, age=None):
    """Write the dumps of a job but for those of some ranks.

    With `age`, they are packed, and were written so many seconds after the last call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        if rank not in without:
            text = json.dumps(dump_of(rank, world, steps, absent))
            if age is None:
                (folder / f"rank_{rank}.json").write_text(text)
            else:
                packed = gzip.compress(text.encode(), mtime=_START + 2 * steps + age)
                (folder / f"rank_{rank}.json.gz").write_bytes(packed)
    return folder


def write_example(folder):
    """Write the job that docs show: rank 5 of 8 loads data, and has a stack."""
    write_dumps(folder, 8, absent=5, steps=20, age=600)
    (folder / "stack_5.txt").write_text(STACK)
    return folder


def host(rank):
    """Where a rank runs: eight on a host."""
    return {
        "host": f"10.0.0.{rank // 8}",
        "pid": 1000 + rank,
        "cuda_dev": rank % 8,
        "nvml_dev": rank % 8,
    }


def communicator(name, ranks, count, *, gone=None, counts=None, errors=None):
    """A communicator of RAS: `gone` has the state of a rank, `counts` its all-reduces."""
    gone, counts, errors = gone or {}, counts or {}, errors or {}
    present = [
        {
            "rank": at,
            **host(rank),
            "status": {
                "init_state": 0,
                "async_error": errors.get(rank, 0),
                "finalize_called": False,
                "destroy_flag": False,
                "abort_flag": False,
            },
            "collective_counts": dict.fromkeys(OPS, 0) | {"AllReduce": counts.get(rank, count)},
        }
        for at, rank in enumerate(ranks)
        if rank not in gone
    ]
    missing = [
        {
            "rank": at,
            **host(rank),
            "status": {
                "unresponsive": gone[rank] != "absent",
                "considered_dead": gone[rank] == "dead",
            },
        }
        for at, rank in enumerate(ranks)
        if rank in gone
    ]
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(ranks),
        "ranks_count": len(present),
        "missing_ranks_count": len(missing),
        "ranks": present,
        "missing_ranks": missing,
    }


def ras_json(*communicators):
    """The JSON of RAS, as NCCL indents it."""
    document = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 12090,
        "cuda_driver_version": 13000,
        "timestamp": "2026-06-19 06:56:24",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 2.05, "timeouts_count": 0},
    }
    return json.dumps(document, indent=2)


RAS_TEXT = """\
NCCL version 2.28.9 compiled with CUDA 12.9
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         31       31

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        31   RUNNING  INCOMPLETE,MISMATCH
    1         1         1         4         4         4   RUNNING  ERROR

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 1021 on node 10.0.0.2 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 1021 on node 10.0.0.2

#1-0 (1bdb83b038775869) ERROR
  Asynchronous error on 1 rank
  Rank 2 reported Remote process error -- GPU 2 managed by process 1002 on node 10.0.0.0

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  30 ranks have launched up to operation 42
  Rank 6 has launched up to operation 41 -- GPU 6 managed by process 1006 on node 10.0.0.0

"""

# What the watchdogs of three releases write.
WATCHDOG = """\
[rank1]:[E1116 18:37:01.833 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, \
Timeout(ms)=600000) ran for 600017 milliseconds before timing out.
[rank1]:[E1116 18:37:01.834 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank 1] \
Timeout at NCCL work: 4, last enqueued NCCL work: 4, last completed NCCL work: 3.
[rank2]:[E ProcessGroupNCCL.cpp:1540] [PG 1 Rank 2] Timeout at NCCL work: 7, last enqueued \
NCCL work: 8, last completed NCCL work: 6.
[rank5]:[E1116 18:37:01.834 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) Rank 5] Received a \
dump signal due to a collective timeout from rank 1 and we will try our best to dump the debug \
info. Last enqueued NCCL work: 3, last completed NCCL work: 3.
"""
