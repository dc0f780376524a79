"""One rank of a job: it trains, its planted fault happens, and a thread dumps its recorder."""

import contextlib
import faulthandler
import gzip
import json
import os
import pickletools
import queue
import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import programs
import torch
import torch.distributed as dist
from plans import Plan
from torch import nn
from torch._C import _distributed_c10d as recorder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

_LONG_S = 3600
_LATE_S, _STRAGGLE_S = 4.0, 0.3
_COMPUTE_S = 0.01
_LEAST_WRITE_S, _MOST_WRITE_S = 1.0, 22.0  # of a rank's part of a checkpoint
_MOST_SAVES = 100
_POLL_S = 0.02
_WIDTH = 48
# Folders of this machine in stacks and logs.
PATHS = re.compile(
    r"[^\s\"'()]*?/(?=site-packages/|lib/python3)|" + re.escape(f"{Path(__file__).parent}/")
)


class State:
    """What ranks and the launcher share: a row of numbers for each of `FIELDS`."""

    FIELDS = ("ticks", "step", "call", "done", "dumped")

    def __init__(self, memory: Any, world: int) -> None:
        """Lay rows over a memory that processes share."""
        numbers = memoryview(memory).cast("q")
        self.trigger = numbers[:1]
        for at, name in enumerate(self.FIELDS):
            setattr(self, name, numbers[1 + at * world : 1 + (at + 1) * world])


class CaughtError(Exception):
    """An error that the job catches."""


class Job:
    """A rank of a job: its groups, and what the plan has it do."""

    def __init__(self, plan: Plan, rank: int, state: Any) -> None:
        """Join the process group of all ranks, and make the others."""
        self.plan, self.rank, self.state = plan, rank, state
        self.step = 0
        self.is_culprit = rank in plan.culprits
        self.rng = random.Random(plan.seed + rank)
        self.groups: dict[str, Any] = {"world": dist.group.WORLD}
        self.mesh: Any = None
        self._make_groups()
        self.hook = None
        if plan.has_hook:
            self.hooks = [
                recorder.FlightRecorderHook.attach(group) for group in self.groups.values()
            ]

    def _make_groups(self) -> None:
        plan = self.plan
        dimensions = [name for name in programs.DIMENSIONS[plan.workload] if name]
        lists = programs.groups(plan.workload, plan.shape)
        if not plan.timeout_s:  # a mesh cannot have one
            shape = plan.shape[: len(dimensions)]
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(dimensions))
            self.groups |= {name: self.mesh.get_group(name) for name in dimensions}
        for name, parts in lists.items():
            for part in parts if name not in self.groups else ():
                group = dist.new_group(part, timeout=_timeout(plan), group_desc=name)
                if self.rank in part:
                    self.groups[name] = group

    def at(self, place: str) -> None:
        """Reach a place of the step, and do what the plan has this rank do there."""
        plan = self.plan
        self.state.ticks[self.rank] += 1
        if not self.is_culprit or place != plan.place:
            return
        if plan.fault == "straggler":
            time.sleep(_STRAGGLE_S)
        if self.step != plan.step:
            return
        if plan.fault == "halt":
            _HALTS[plan.how]()
        elif plan.fault == "late":
            time.sleep(_LATE_S)
        elif plan.fault == "caught":
            raise CaughtError
        elif plan.fault == "world_gather":
            self.execute(programs.Call(name="more", op="all_gather", group="world", size=4))

    def execute(self, call: programs.Call, number: int = 0) -> None:
        """Make a call."""
        self.state.call[self.rank] = number
        self.state.ticks[self.rank] += 1
        group = self.groups[call.group]
        ranks = dist.get_process_group_ranks(group)
        _OPERATIONS[call.op](call, group, ranks, self.rank)
        self.state.call[self.rank] = -1
        self.state.ticks[self.rank] += 1

    def batches(self) -> Iterator[int]:
        """Return the batches of this rank."""
        plan = self.plan
        is_short = plan.fault == "uneven" and self.is_culprit
        return Batches(self, plan.step if is_short else plan.steps)

    def compute(self) -> None:
        """Do as if there was work."""
        time.sleep(self.plan.slowness * _COMPUTE_S * (0.5 + self.rng.random()))


class Batches:
    """Loads the batches of a rank."""

    def __init__(self, job: Job, count: int) -> None:
        """Load as many batches."""
        self.job, self.remaining = job, count

    def __iter__(self) -> Iterator[int]:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Return the next batch: its number."""
        job = self.job
        if self.remaining == 0:
            raise StopIteration
        self.remaining -= 1
        job.step += 1
        job.state.step[job.rank] = job.step
        if job.step == job.plan.checkpoint_step:
            threading.Thread(target=_write_checkpoint, args=(job,), daemon=True).start()
        job.at("data")
        return job.step


# Operations


def _tensor(call: programs.Call, count: int = 1) -> Any:
    return torch.ones(call.size * count, dtype=getattr(torch, call.dtype))


def _all_reduce(call: programs.Call, group: Any, _ranks: Any, _rank: int) -> None:
    dist.all_reduce(_tensor(call), group=group)


def _all_gather(call: programs.Call, group: Any, ranks: Any, _rank: int) -> None:
    dist.all_gather([_tensor(call) for _ in ranks], _tensor(call), group=group)


def _all_to_all(call: programs.Call, group: Any, _ranks: Any, _rank: int) -> None:
    dist.all_to_all_single(_tensor(call), _tensor(call), group=group)


def _broadcast(call: programs.Call, group: Any, ranks: Any, _rank: int) -> None:
    dist.broadcast(_tensor(call), src=ranks[call.root], group=group)


def _scatter(call: programs.Call, group: Any, ranks: Any, rank: int) -> None:
    root = ranks[call.root]
    parts = [_tensor(call) for _ in ranks] if rank == root else None
    dist.scatter(_tensor(call), parts, src=root, group=group)


def _gather(call: programs.Call, group: Any, ranks: Any, rank: int) -> None:
    root = ranks[call.root]
    parts = [_tensor(call) for _ in ranks] if rank == root else None
    dist.gather(_tensor(call), parts, dst=root, group=group)


def _barrier(_call: programs.Call, group: Any, _ranks: Any, _rank: int) -> None:
    dist.barrier(group=group)


def _send(call: programs.Call, group: Any, ranks: Any, rank: int) -> None:
    peer = ranks[(ranks.index(rank) + call.peer) % len(ranks)]
    dist.send(_tensor(call), dst=peer, group=group)


def _recv(call: programs.Call, group: Any, ranks: Any, rank: int) -> None:
    peer = ranks[(ranks.index(rank) + call.peer) % len(ranks)]
    dist.recv(_tensor(call), src=peer, group=group)


_OPERATIONS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "barrier": _barrier,
    "send": _send,
    "recv": _recv,
}


# Faults


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _pipe() -> None:
    reading, _ = os.pipe()
    os.read(reading, 1)


_HALTS = {
    "sleep": lambda: time.sleep(_LONG_S),
    "lock": _lock,
    "pipe": _pipe,
    "queue": lambda: queue.Queue().get(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def _write_checkpoint(job: Job) -> None:
    """Write a checkpoint beside the training, with a group that this thread makes."""
    group = dist.new_group(group_desc="checkpoint", timeout=_timeout(job.plan))
    for number in range(_MOST_SAVES):
        slowest = random.Random(f"{job.plan.seed} {number}").randrange(job.plan.world)
        dist.all_gather([torch.ones(4) for _ in range(job.plan.world)], torch.ones(4), group)
        share = 1.0 if job.rank == slowest else 0.6 * job.rng.random()
        time.sleep(_LEAST_WRITE_S + share * (_MOST_WRITE_S - _LEAST_WRITE_S))
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier(group=group)


# Workloads


def train_program(job: Job) -> None:
    """Make the calls of a list in each step."""
    plan = job.plan
    own = programs.calls(plan.workload, plan.shape, job.rank, plan.seed)
    place = {call.name: at for at, call in enumerate(own)}
    for step in job.batches():
        with contextlib.suppress(CaughtError):
            job.compute()
            calls = own
            if step == plan.step and plan.fault == "creation" and not job.is_culprit:
                dist.new_group([*plan.members])
            if step == plan.step and job.is_culprit and plan.calls:
                calls = programs.changed(own, plan.fault, plan.calls, **plan.change)
            elif step == plan.step and plan.fault == "sends_first":
                calls = programs.changed(own, plan.fault, ())
            for call in calls:
                job.at(f"before {call.name}")
                job.execute(call, place[call.name])
                job.at(f"after {call.name}")


def _layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(3))
    )


def train_ddp(job: Job) -> None:
    """Train a model whose gradients DDP reduces in buckets."""
    model = DistributedDataParallel(_layers(), bucket_cap_mb=0.01)
    _train(job, model)


def train_fsdp(job: Job) -> None:
    """Train a model that FSDP shards over all ranks."""
    model = _layers()
    for layer in model:
        fully_shard(layer, mesh=job.mesh)
    _train(job, fully_shard(model, mesh=job.mesh))


def train_tpdp(job: Job) -> None:
    """Train a model of DTensors: tensor parallel, and sharded across."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    plan = {str(at): (RowwiseParallel() if at % 2 else ColwiseParallel()) for at in range(4)}
    parallelize_module(model, job.mesh["tp"], plan)
    for layer in model:
        fully_shard(layer, mesh=job.mesh["dp"])
    _train(job, fully_shard(model, mesh=job.mesh["dp"]))


def _train(job: Job, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in job.batches():
        is_alone = job.plan.fault == "no_sync" and job.is_culprit and step == job.plan.step
        with model.no_sync() if is_alone else contextlib.nullcontext():
            job.at("before_forward")
            loss = model(torch.ones(4, _WIDTH)).square().mean()
            job.at("before_backward")
            loss.backward()
            job.at("after_backward")
        optimizer.step()
        optimizer.zero_grad()
        job.compute()
        job.execute(programs.Call(name="loss", op="all_reduce", group="world", size=1))


_WORKLOADS = {"ddp": train_ddp, "fsdp": train_fsdp, "tpdp": train_tpdp}


def _end(job: Job) -> None:
    """End the job: what comes after the last step."""
    plan = job.plan
    if plan.how == "barrier":
        dist.barrier()
    if plan.fault == "teardown" and job.is_culprit:
        job.execute(programs.Call(name="more", op="all_reduce", group="world", size=_WIDTH))
    elif plan.fault == "teardown":
        dist.destroy_process_group()


# The process


def _timeout(plan: Plan) -> timedelta:
    return timedelta(seconds=plan.timeout_s or 120)


def run(plan: Plan, rank: int, port: int, state: Any, folder: Path) -> None:
    """Be one rank; ends only by a signal."""
    log = (folder / f"rank_{rank}.log").open("w")
    os.dup2(log.fileno(), 2)
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(plan.entries)
    torch.set_num_threads(1)
    threading.Thread(target=_watch, args=(plan, rank, state, folder), daemon=True).start()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=plan.world, timeout=_timeout(plan)
        )
        job = Job(plan, rank, state)
        _write_groups(folder / f"groups_{rank}.json")
        _WORKLOADS.get(plan.workload, train_program)(job)
        _end(job)
        state.done[rank] = 1
    except Exception:  # whatever it is, the rank stays until it is dumped
        traceback.print_exc()
        state.done[rank] = 2
    time.sleep(_LONG_S)


def _write_groups(path: Path) -> None:
    """Write what no dump of gloo has: the members of all groups."""
    groups = dist.distributed_c10d._world.pg_group_ranks
    members = {
        group.group_name: [group.group_desc, sorted(ranks)]
        for group, ranks in groups.items()
        if isinstance(group, dist.ProcessGroup)  # other groups have a number
    }
    path.write_text(json.dumps(members))


def _watch(plan: Plan, rank: int, state: Any, folder: Path) -> None:
    """Dump the recorder of this rank each time that the launcher wants it."""
    while True:
        moment = state.trigger[0]
        if moment > state.dumped[rank]:
            target = folder / f"snapshot_{moment - 1}" if plan.moment == "late" else folder
            target.mkdir(exist_ok=True)
            if rank not in plan.lost:
                _dump(plan, rank, target)
                _dump_for_analyzer(rank, folder.parent / "pickles")
            state.dumped[rank] = moment
        time.sleep(_POLL_S)


def _dump(plan: Plan, rank: int, folder: Path) -> None:
    name, _, kind = plan.form.replace("N", str(rank)).partition(".")
    if kind in ("json", "both"):
        _pack(folder / f"{name}.json.gz", recorder._dump_fr_trace_json())
    if kind != "json":
        suffix = ".pickle.gz" if kind else ".gz"
        _pack(folder / f"{name}{suffix}", without_paths(recorder._dump_fr_trace()))
    if plan.has_stacks:
        path = folder / f"stack_{rank}.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        path.write_text(PATHS.sub("", path.read_text()))


def _dump_for_analyzer(rank: int, folder: Path) -> None:
    """Write a pickle as PyTorch does: its analyzer reads nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(recorder._dump_fr_trace())


def _pack(path: Path, content: bytes) -> None:
    """Write a dump with the time of this moment in gzip's header."""
    partial = path.with_name(f"_{path.name}.part")
    partial.write_bytes(gzip.compress(content, 9, mtime=int(time.time())))
    partial.rename(path)


def without_paths(pickled: bytes) -> bytes:
    """Return a pickle with shorter paths in its texts, and nothing else changed."""
    parts, end = [], 0
    for opcode, text, at in pickletools.genops(pickled):
        if opcode.name != "BINUNICODE" or "/" not in text:
            continue
        shorter = PATHS.sub("", text).encode()
        parts += [pickled[end:at], b"X", len(shorter).to_bytes(4, "little"), shorter]
        end = at + 5 + len(text.encode())
    return b"".join((*parts, pickled[end:]))
