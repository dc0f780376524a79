"""One rank of a training job: train steps with and without a planted fault, and record them.

Started by `record.py`, with PyTorch. Blocks alternate between clean and faulty in the same
processes, so that the difference of their step times is what the fault costs on this machine at
this time.
"""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

RANKS, WIDTH, LENGTH, BATCH, LAYERS = 4, 192, 32, 4, 2
MICRO_BATCHES = 4
SUSPECT = 2  # the rank with the fault, or one of its stage
SLEEP_S, LOADING_S, GARBAGE = 0.06, 0.06, 30_000
RATE = "100mbit"  # of a slow link
NEIGHBORS = 1
REPEAT = 20  # of the work of a layer


class Block(nn.Module):
    """Attention and a feed-forward network, with residuals.

    `repeat` is how often a rank computes; all but the last are work of its own, without
    collectives.
    """

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.repeat = 1
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.more = torch.randn(12, WIDTH, WIDTH)  # as many weights as the layers have

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        for _ in range(self.repeat - 1):
            for weight in self.more:
                x.detach() @ weight
        y = self.norm(x)
        heads = [
            layer(y).unflatten(-1, (-1, 32)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single`, whose gradient is sent back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any
    ) -> Tensor:
        ctx.splits = sent, received, group
        result = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received, group = ctx.splits
        result = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(result, grads[0].contiguous(), sent, received, group=group)
        return result, None, None, None


class Experts(nn.Module):
    """One expert a rank: tokens go to the expert that `popularity` draws, and come back."""

    def __init__(self, group: Any) -> None:
        """Create the expert of this rank; `group` is the process group of the experts."""
        super().__init__()
        self.group = group
        self.expert = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.popularity = torch.ones(RANKS)

    def forward(self, x: Tensor) -> Tensor:
        """Send the tokens of `x` to experts, and add their results."""
        tokens = x.flatten(0, 1)
        expert = torch.multinomial(self.popularity, len(tokens), replacement=True)
        order = expert.argsort()
        counts = torch.bincount(expert, minlength=RANKS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        splits = counts.tolist(), received.tolist()
        dispatched = _AllToAll.apply(tokens[order], *splits, self.group)
        combined = _AllToAll.apply(self.expert(dispatched), *splits[::-1], self.group)
        return x + combined[order.argsort()].view_as(x)


class Tokens(Dataset[Tensor]):
    """Random inputs; loading a batch takes `delay_s` longer."""

    delay_s = 0.0

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_s and index % BATCH == 0:
            time.sleep(self.delay_s)
        return torch.randn(LENGTH, WIDTH)


class Job:
    """A model with its parallelism, and one step of its training."""

    def __init__(self, kind: str, rank: int, batch: int = BATCH) -> None:
        """Create a job: `kind` is a method of this class without its underscore."""
        self.kind, self.rank = kind, rank
        self.batches = iter(DataLoader(Tokens(), batch_size=batch))
        self.schedule: Any = None
        self.stage = rank  # of the pipeline, if there is one
        self.stages = 1
        self.model = getattr(self, f"_{kind}")()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=True)

    def blocks(self) -> list[Block]:
        """Return the blocks of this rank."""
        return [module for module in self.model.modules() if isinstance(module, Block)]

    def experts(self) -> list[Experts]:
        """Return the layers with experts."""
        return [module for module in self.model.modules() if isinstance(module, Experts)]

    def _layers(self, count: int = LAYERS) -> nn.Sequential:
        return nn.Sequential(*(Block() for _ in range(count)))

    def _ddp(self) -> nn.Module:
        return DistributedDataParallel(self._layers(), bucket_cap_mb=1)

    def _fsdp(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
        return self._sharded(self._layers(), mesh)

    def _sharded(self, model: nn.Sequential, mesh: Any) -> nn.Module:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def _tp_fsdp(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = self._layers(1)
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        for layer in model:
            parallelize_module(layer, mesh["tp"], plan)
        return self._sharded(model, mesh["dp"])

    def _pp(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        return self._pipeline(mesh["pp"].get_group(), self.rank, RANKS)

    def _pp_dp(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        return self._pipeline(mesh["pp"].get_group(), self.rank // 2, 2, mesh["dp"])

    def _pipeline(self, group: Any, stage: int, stages: int, dp: Any = None) -> nn.Module:
        model = self._layers(1)
        if dp is not None:
            self._sharded(model, dp)
        self.stage, self.stages = stage, stages
        part = PipelineStage(model, stage, stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(
            part, MICRO_BATCHES, loss_fn=lambda result, _: result.square().mean()
        )
        return model

    def _ep(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        dense = DistributedDataParallel(Block())
        return nn.Sequential(dense, Experts(mesh["ep"].get_group()))

    def step(self) -> None:
        """Train one step."""
        batch = next(self.batches)
        if self.schedule is None:
            self.model(batch).square().mean().backward()
        else:
            self._pipelined()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _pipelined(self) -> None:
        whole = torch.randn(2 * MICRO_BATCHES, LENGTH, WIDTH)
        inputs = (whole,) if self.stage == 0 else ()
        is_last = self.stage == self.stages - 1
        self.schedule.step(*inputs, **({"target": whole, "losses": []} if is_last else {}))


class Fault:
    """The planted fault of a job, which blocks switch on and off.

    straggler: a rank computes more in each block; stage: all ranks of a stage do. sleep: a
    rank sleeps before each step. loader: its batches take longer. gc: one rank after another
    collects garbage. experts: one expert gets most tokens. neighbor: other processes compute
    in its share of a core. link: the network of a rank has a low rate.
    """

    def __init__(self, job: Job, name: str) -> None:
        """Plant a fault in the job of this rank; none is switched on."""
        self.job, self.name = job, name
        self.is_suspect = job.rank == SUSPECT
        self.is_on = False
        self.neighbors: list[subprocess.Popen[bytes]] = []
        self.garbage: list[Any] = []

    def switch(self, is_on: bool) -> None:
        """Switch the fault on or off, before a block begins."""
        self.is_on = is_on
        here = is_on and self.is_suspect
        is_stage = is_on and self.job.stage == self.job.stages // 2
        for block in self.job.blocks():
            slow = here if self.name == "straggler" else is_stage and self.name == "stage"
            block.repeat = REPEAT if slow else 1
        for layer in self.job.experts():
            layer.popularity[SUSPECT] = 8.0 if is_on and self.name == "experts" else 1.0
        Tokens.delay_s = LOADING_S if here and self.name == "loader" else 0.0
        if self.name == "neighbor":
            self._neighbor(here)
        if self.name == "link" and self.is_suspect:
            self._link(is_on)

    def before_step(self, step: int) -> None:
        """Do what the fault does inside of a step, before its work."""
        if self.is_on and self.name == "sleep" and self.is_suspect:
            time.sleep(SLEEP_S)
        if self.is_on and self.name == "gc" and step % RANKS == self.job.rank:
            self.garbage = [[{"number": number}] for number in range(GARBAGE)]
            gc.collect()

    def _neighbor(self, is_on: bool) -> None:
        """Start processes that take part of this rank's share of a core, or end them."""
        for process in self.neighbors:
            process.kill()
            process.wait()
        endless = [sys.executable, "-c", "while True: pass"]
        self.neighbors = [subprocess.Popen(endless) for _ in range(NEIGHBORS * is_on)]

    def _link(self, is_on: bool) -> None:
        """Limit the rate of this rank's network namespace, or not."""
        limit = ["tbf", "rate", RATE, "burst", "64kb", "latency", "400ms"]
        done = ["tc", "qdisc", "replace" if is_on else "del", "dev", "eth0", "root"]
        subprocess.run([*done, *(limit if is_on else [])], check=False, capture_output=True)


def main() -> None:
    """Train all blocks; write the trace of each block, and the seconds of its steps."""
    kind, fault_name, folder, blocks, steps = sys.argv[1:6]
    rank, out = int(os.environ["RANK"]), Path(folder)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    gc.disable()
    # Transfers also need the core: with little compute they would be most of the cost.
    job = Job(kind, rank, BATCH * (8 if fault_name == "neighbor" else 1))
    fault = Fault(job, fault_name)
    for number in range(int(blocks)):
        fault.switch(number % 2 == 1)
        times = _block(job, fault, number, int(steps), out)
        (out / f"times-{number}-{rank}.json").write_text(json.dumps(times))
    fault.switch(False)
    dist.barrier()
    dist.destroy_process_group()


def _block(job: Job, fault: Fault, number: int, steps: int, out: Path) -> list[float]:
    """Record one block; return the seconds of each recorded step."""
    times = []
    has_nodes = os.environ.get("EXECUTION_TRACE") == "1"
    nodes = out / f"torch_et_{number}_{job.rank}.json"
    observer = ExecutionTraceObserver().register_callback(str(nodes)) if has_nodes else None
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=steps),
        record_shapes=True,
        execution_trace_observer=observer,
    ) as profiler:
        for step in range(2 + steps):
            begin = time.perf_counter()
            fault.before_step(step)
            job.step()
            times.append(time.perf_counter() - begin)
            profiler.step()
    profiler.export_chrome_trace(str(out / f"block{number}-rank{job.rank}.json"))
    gc.collect()
    dist.barrier()
    return times[2:]


if __name__ == "__main__":
    main()
