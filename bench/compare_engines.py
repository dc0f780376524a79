"""Threads against processes, for docs/scale-out.md: the same ranks, read and measured.

    python bench/compare_engines.py [WORKERS]

Prints how many times as fast as one after another both are, from JSON and from a store.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from fastcomm.executors.executor import PRELOAD, Local, Task, both
from fastcomm.executors.processes import start_early
from fastcomm.formats.opening import open_run
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.partial import Partial, merge
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

ROUNDS = 3
# Bytes of a rank's JSON, and ranks: small traces spend more of their time in Python.
RUNS = {"64 ranks of 0.5 MB": (500_000, 64), "16 ranks of 10 MB": (10_000_000, 16)}
FROM = {"run": "gzipped JSON", "store": "store"}


def one_after_another(run, _workers):
    for source in run.sources:
        Partial.of(source.read())


def threads(run, workers):
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda source: Partial.of(source.read()), run.sources))


def processes(run, workers):
    Local(workers=workers, preload=PRELOAD).gather(
        run, Task(measure=Partial.of, merge=merge, finish=both)
    )


def main(workers):
    start_early(PRELOAD)
    print(f"{'':<34}{'threads':>11}{'processes':>11}   ({workers} of them)")
    for name, (size, ranks) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Job.of(ranks=ranks), Path(folder) / "run", filler_bytes=size)
            ingest(plan([Path(folder) / "run"], Path(folder) / "store"))
            for kind in ("run", "store"):
                run = open_run(Path(folder) / kind)
                best = {
                    way: min(seconds(way, run, workers) for _ in range(ROUNDS))
                    for way in (one_after_another, threads, processes)
                }
                alone = best[one_after_another]
                words = f"{name}, {FROM[kind]}"
                ratios = (alone / best[way] for way in (threads, processes))
                print(f"{words:<34}" + "".join(f"{ratio:>10.2f}x" for ratio in ratios))


def seconds(way, run, workers):
    begun = perf_counter()
    way(run, workers)
    return perf_counter() - begun


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
