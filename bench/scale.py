"""fastcomm on runs of 64, 512 and 4096 made-up ranks, and on one trace of 5 GB.

    python bench/scale.py [--folder DIR] [--ranks 64,512,4096] [--workers 2] [--write PAGE]

Traces of 20 thousand events a rank are written to DIR (3 GB for 4096 ranks, 5 GB for the large
trace), where they stay for the next time. Each command is a whole process with its workers; the
time of processors and the memory are those of all of them, read from /proc four times a second,
so Linux alone. Memory counts twice nothing that processes share: it is the sum of their
proportional set sizes. With --write, the table replaces the one in PAGE.
"""

import argparse
import gzip
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fastcomm.synthetic import Job, write

SECOND = os.sysconf("SC_CLK_TCK")
BARS = {("gzipped JSON", 4096): 60.0, ("store", 4096): 15.0, ("JSON of 5 GB", 1): 10.0}
LARGE = 5_000_000_000
PAUSE = 0.25  # s between two looks: more often would take time from what is measured
HEAD = ("input", "ranks", "events", "wall", "CPU a 1000 events", "peak memory", "bar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one command took: seconds of the clock and of processors, bytes at the peak."""

    wall: float
    cpu: float
    memory: int


def used(command):
    """Run a command in a session of its own and watch all processes of it."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, start_new_session=True, env=os.environ
    )
    cpu, peak = {}, 0
    while process.poll() is None:
        now = list(processes(process.pid))
        cpu.update({pid: ticks for pid, ticks, _ in now})
        peak = max(peak, sum(memory for _, _, memory in now))
        time.sleep(PAUSE)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {process.returncode}")
    wall = time.perf_counter() - begun
    return Use(wall=wall, cpu=sum(cpu.values()) / SECOND, memory=peak)


def cached(folder):
    """The folder, with its files in the page cache, as they are for who asks again."""
    for each in folder.iterdir():
        with each.open("rb") as file:
            while file.read(1 << 24):
                pass
    return folder


def processes(session):
    """Number, ticks of the processor and bytes of each process of a session."""
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session:
                rollup = (path / "smaps_rollup").read_text()
                pss = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
                yield int(path.name), int(stat[11]) + int(stat[12]), int(pss[1]) * 1024
        except (OSError, TypeError):
            continue  # it has ended meanwhile


def traces(folder, ranks):
    """The traces of a run, written if they are not there yet."""
    where = folder / f"traces-{ranks}"
    job = Job.of(ranks, steps=4, micro_batches=6)
    if len(list(where.glob("*.gz"))) != ranks:
        write(job, where, workers=os.cpu_count())
    return where


def events(path):
    """About how many events the traces of a run have: those of 16 ranks, as many times."""
    every = sorted(path.glob("*.gz"))
    some = every[:: max(1, len(every) // 16)]
    return (
        sum(gzip.decompress(each.read_bytes()).count(b'"ph":') for each in some)
        * len(every)
        // len(some)
    )


def measured(folder, ranks, workers):
    """The rows of one run: from its traces, stored, and from the store."""
    where, store = traces(folder, ranks), folder / f"store-{ranks}"
    program = [sys.executable, "-m", "fastcomm"]
    many = ["--workers", str(workers)]
    from_json = used([*program, "metrics", cached(where), "--json", *many])
    if not (store / "fastcomm.json").exists():
        yield "ingest", ranks, None, used([*program, "ingest", where, "-o", store, *many])
    count = events(where)
    yield "gzipped JSON", ranks, count, from_json
    yield "store", ranks, count, used([*program, "metrics", cached(store), "--json", *many])


def large(folder):
    """The row of one trace of 5 GB."""
    where = folder / "large"
    path = where / "rank0.pt.trace.json"
    if not path.exists():
        write(Job.of(8, steps=8), where, ranks=[0], compress=False, filler_bytes=LARGE)
    with path.open("rb") as file:
        text = 0
        while block := file.read(1 << 24):
            text += block.count(b'"ph":')
    cached(where)
    use = used([sys.executable, "-m", "fastcomm", "metrics", path, "--json"])
    return "JSON of 5 GB", 1, text, use


def row(kind, ranks, count, use):
    """One line of the table, and whether its bar holds."""
    bar = BARS.get((kind, ranks))
    each = f"{use.cpu / count * 1e6:.2f} ms" if count else ""
    told = "" if bar is None else f"{bar:g} s: {'holds' if use.wall <= bar else 'MISSED'}"
    words = (
        kind,
        f"{ranks}",
        f"{count / 1e6:.1f} M" if count else "",
        f"{use.wall:.1f} s",
        each,
        f"{use.memory / 1e6:.0f} MB",
        told,
    )
    return f"| {' | '.join(words)} |", bar is None or use.wall <= bar


def main():
    said = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    said.add_argument("--folder", type=Path, default=Path(".cache/scale"))
    said.add_argument("--ranks", default="64,512,4096")
    said.add_argument("--workers", type=int, default=os.cpu_count())
    said.add_argument("--write", type=Path, metavar="PAGE")
    words = said.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    good = True
    print(*lines, sep="\n", flush=True)
    sizes = [int(each) for each in words.ranks.split(",") if each]
    rows = (each for ranks in sizes for each in measured(words.folder, ranks, words.workers))
    for each in chain(rows, map(large, [words.folder])):
        line, holds = row(*each)
        good &= holds
        lines.append(line)
        print(line, flush=True)
    if words.write:
        page = words.write.read_text("utf-8")
        table = "\n".join(lines)
        marked = re.compile(r"(?<=<!-- scale -->\n).*?(?=<!-- end of scale -->)", re.DOTALL)
        words.write.write_text(marked.sub(lambda _: f"{table}\n", page), "utf-8")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
