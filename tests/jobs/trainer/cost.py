"""Measure what `fastcomm.torch` costs a real job: ``cost.py FOLDER [SECONDS]``.

Needs PyTorch and fastcomm in one environment; `make trainer-cost` makes it. Four processes
train with gloo on this machine, and compare with themselves, so that what else the machine does
cancels out. Outside of windows, blocks of steps alternate without and with the recommended
profiler. In windows, `fastcomm.torch` alternates with PyTorch's `tensorboard_trace_handler`.

Printed are the medians of the ratios of all pairs, and between which values the median lies
with 95 % confidence, for which six pairs are the least. The program fails if the median lies
above what `docs/trainer.md` claims, with that confidence.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median

RANKS = 4
SECONDS = 180.0
MOST_OUTSIDE, MOST_INSIDE = 1.002, 1.0  # times the step, or the window, of the other kind
_OUTSIDE = 0.55  # share of the time for blocks outside of windows
_BLOCK, _WINDOW, _BEFORE = 25, 3, 2  # steps
_LEAST_PAIRS = 6  # the range of fewer has no 95 % confidence
_WRITING_S = 60.0  # at most, until a window is written
_WIDTH, _LAYERS, _BATCH = 512, 8, 64


def train_step():
    """Return a function that does one step of training."""
    import torch
    from torch import nn

    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(_BATCH, _WIDTH)

    def step():
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def goes_on(until):
    """Return whether rank 0 has time left; all ranks agree."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([float(time.monotonic() < until)])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def outside(step, folder, until):
    """Return the times of steps in pairs of blocks, without and with the profiler.

    Steps of a profiled window, and the calls that begin and end it, are left out. The second
    list has the times of the calls of the profiler alone.
    """
    import fastcomm.torch

    pairs, calls, number = [], [], 0
    with fastcomm.torch.profiler(every=500, steps=_WINDOW, directory=folder) as prof:
        while goes_on(until):
            block = {}
            # The order alternates, too.
            for with_profiler in (True, False) if len(pairs) % 2 else (False, True):
                block[with_profiler] = []
                for _ in range(_BLOCK):
                    begin = time.perf_counter()
                    step()
                    called = time.perf_counter()
                    if with_profiler:
                        prof.step()
                        number += 1
                    end = time.perf_counter()
                    # Windows end at steps 13, 513, ...; their first step warms up.
                    is_outside = not with_profiler or not 9 <= number % 500 <= 13
                    if is_outside:
                        block[with_profiler].append(end - begin)
                        if with_profiler:
                            calls.append(end - called)
            pairs.append((median(block[False]), median(block[True])))
    return pairs, calls


def inside(step, folder, until):
    """Return the times of windows in pairs, of PyTorch's handler and of fastcomm's.

    Each is a pair: the time of all steps of the window, and of the call that exports it.
    """
    from torch.profiler import profile, schedule, tensorboard_trace_handler

    import fastcomm.torch
    from fastcomm.torch.handler import own_process

    def handler(name):
        return (
            tensorboard_trace_handler(str(folder / name))
            if name == "pytorch"
            else fastcomm.torch.trace_handler(folder / name, report=True)
        )

    pairs = []
    handlers = {name: handler(name) for name in ("pytorch", "fastcomm")}
    while goes_on(until):
        names = [*handlers] if len(pairs) % 2 else [*reversed(handlers)]
        pair = {}
        for name in names:
            own_process().end(_WRITING_S)
            when = schedule(wait=0, warmup=1, active=_WINDOW, repeat=1)
            goes_on(until)  # all ranks begin at once
            begin = time.perf_counter()
            with profile(schedule=when, on_trace_ready=handlers[name]) as prof:
                for _ in range(1 + _WINDOW):
                    step()
                    called = time.perf_counter()
                    prof.step()
                    held = time.perf_counter() - called
            pair[name] = time.perf_counter() - begin, held
        pairs.append((pair["pytorch"], pair["fastcomm"]))
    return pairs


def train(folder, seconds):
    """Be one rank; write its times to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, begin = train_step(), time.monotonic()
    for _ in range(_BLOCK):
        step()
    blocks, calls = outside(step, folder / "outside", begin + _OUTSIDE * seconds)
    windows = inside(step, folder, begin + seconds)
    times = {"blocks": blocks, "calls": calls, "windows": windows}
    (folder / f"times-{dist.get_rank()}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def run(folder, seconds):
    """Run the job; return the times of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    own = {**os.environ, **job, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, str(folder), str(seconds)]
    with (folder / "output.txt").open("w") as output:
        ranks = [
            subprocess.Popen(
                words, env={**own, "RANK": str(rank)}, stdout=output, stderr=output
            )
            for rank in range(RANKS)
        ]
        assert [rank.wait(seconds + 120) for rank in ranks] == [0] * RANKS
    return [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(RANKS)]


def judged(name, pairs, most):
    """Print the median of ratios and its interval; return whether it is surely above `most`."""
    ratios = sorted(after / before for before, after in pairs)
    count = len(ratios)
    aside = max(0, int(count / 2 - 0.98 * count**0.5))
    low, high = ratios[aside], ratios[count - 1 - aside]
    print(
        f"{name}: {median(ratios):.4f} ({low:.4f} to {high:.4f}) in {count} pairs; "
        f"at most {most:g}",
        flush=True,
    )
    return count >= _LEAST_PAIRS and low > most


def main():
    """Run the job and print its ratios, or be one of its ranks."""
    folder = Path(sys.argv[1]).absolute()
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    if "RANK" in os.environ:
        train(folder, seconds)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = run(folder, seconds)
    pairs = {
        # Ranks wait for each other: a pair is the mean of all.
        name: [tuple(map(fmean, zip(*one, strict=True))) for one in zip(*rows, strict=True)]
        for name, rows in (
            ("outside", [rank["blocks"] for rank in ranks]),
            ("window", [[(a[0], b[0]) for a, b in rank["windows"]] for rank in ranks]),
            ("held", [[(a[1], b[1]) for a, b in rank["windows"]] for rank in ranks]),
        )
    }
    call, step = median(ranks[0]["calls"]), median(before for before, _ in pairs["outside"])
    print(f"step: {1e3 * step:.2f} ms; the profiler's call: {1e6 * call:.1f} us, "
          f"{call / step:.4%} of a step")  # fmt: skip
    above = [
        judged("step outside of windows, with / without", pairs["outside"], MOST_OUTSIDE),
        judged("window, fastcomm / tensorboard_trace_handler", pairs["window"], MOST_INSIDE),
        judged("export, fastcomm / tensorboard_trace_handler", pairs["held"], MOST_INSIDE),
    ]
    sys.exit(int(any(above)))


if __name__ == "__main__":
    main()
