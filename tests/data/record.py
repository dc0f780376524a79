"""Record the traces of this folder: a small job of four processes, by PyTorch's own profiler.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy
    /tmp/torch/bin/python tests/data/record.py tests/data/gloo_2x2

Tensor parallelism in pairs, data parallelism across them, a ring of messages and an all-to-all,
on CPUs by Gloo: events of the host alone. Beside each trace lies the execution trace of its
last step. Host names are replaced; nothing else is changed.
"""

import gzip
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

RANKS, WIDTH, STEPS = 4, 32, 2


def main(folder: Path) -> None:
    """Run the job, and write a trace and an execution trace a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(folder, port), nprocs=RANKS)


def _rank(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    step_by_sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    trace, nodes = folder / f"kineto_trace_{rank}.json", folder / f"torch_et_{rank}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        record_shapes=True,
        execution_trace_observer=ExecutionTraceObserver().register_callback(str(nodes)),
    ) as recorded:
        for _ in range(2 + STEPS):
            _step(rank, model, step_by_sgd, mesh)
            recorded.step()
    recorded.export_chrome_trace(str(trace))
    dist.destroy_process_group()
    _packed(trace)
    _packed(nodes)


def _step(
    rank: int, model: nn.Module, step_by_sgd: torch.optim.Optimizer, mesh: object
) -> None:
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    found = model(torch.randn(8, WIDTH))
    dist.all_reduce(found.detach(), group=tp)
    gathered = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(gathered, found.detach(), group=tp)
    _ring(rank)
    exchanged = torch.empty(RANKS * 4)
    dist.all_to_all_single(exchanged, torch.randn(RANKS * 4))
    found.square().mean().backward()
    for each in model.parameters():
        dist.all_reduce(each.grad, group=dp)
    step_by_sgd.step()
    step_by_sgd.zero_grad()
    dist.broadcast(torch.zeros(16), src=0)


def _ring(rank: int) -> None:
    """Send to the next rank, and receive of the one before."""
    sent = dist.isend(torch.ones(64), (rank + 1) % RANKS)
    dist.recv(torch.empty(64), (rank - 1) % RANKS)
    sent.wait()


def _packed(path: Path) -> None:
    """Replace a file by its gzipped text, without the name of this machine."""
    text = path.read_text().replace(socket.gethostname(), "localhost")
    said = json.loads(text)
    if "traceName" in said:
        said["traceName"] = path.name
    packed = gzip.compress(json.dumps(said, separators=(",", ":")).encode(), 9, mtime=0)
    path.with_suffix(".json.gz").write_bytes(packed)
    path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
