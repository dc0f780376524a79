"""One rank of a training job that reports on itself: ``worker.py DIRECTORY FAULT``.

Started by `check.py`, with PyTorch and gloo. Faults: "none"; "straggler", rank 2 computes more;
"dies", rank 3 ends before it exports its second window; "full", rank 1 has no disk for traces;
"loader", batches come from forked processes.
"""

import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastcomm.torch

STEPS, EVERY, WINDOW, FIRST = 50, 20, 3, 5
WIDTH, LAYERS, BATCH = 256, 6, 64
SUSPECT, FULL, DEAD = 2, 1, 3
_LEFT = 1 << 14  # bytes of a file on a full disk
# Seconds that rank 0 waits for the others: long where all of them come, as on a busy machine
# processes of low priority take minutes.
_TIMEOUT_S, _DEAD_TIMEOUT_S = 240.0, 60.0


class Batches(Dataset):
    """Random inputs."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return torch.randn(BATCH, WIDTH)


def main():
    """Train with the recommended profiler."""
    directory, fault = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if fault == "full" and rank == FULL:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LEFT, _LEFT))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"} if fault == "loader" else {}
    batches = DataLoader(Batches(), batch_size=None, **workers)
    matrix = torch.randn(4 * WIDTH, 4 * WIDTH)
    options = {"every": EVERY, "steps": WINDOW, "first": FIRST}
    options["timeout_s"] = _DEAD_TIMEOUT_S if fault == "dies" else _TIMEOUT_S
    with fastcomm.torch.profiler(directory=directory, record_shapes=True, **options) as prof:
        for step, batch in enumerate(batches):
            if fault == "straggler" and rank == SUSPECT:
                for _ in range(2):
                    matrix @ matrix
            if fault == "dies" and rank == DEAD and step == FIRST + EVERY:
                os.kill(os.getpid(), 9)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"trained in {time.monotonic() - started:.1f} s", file=sys.stderr)
