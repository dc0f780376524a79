"""fastcomm on runs of 64, 512 and 4096 made-up ranks, and on one trace of 5 GB.

    python bench/scale.py [--folder DIR] [--ranks 64,512,4096] [--workers 2] [--write PAGE]

Traces of 20 thousand events a rank are written to DIR (3 GB for 4096 ranks, 5 GB for the large
trace), where they stay for the next time. Each command is a whole process with its workers; the
time of processors and the memory are those of all of them, read from /proc four times a second,
so Linux alone. Memory counts twice nothing that processes share: it is the sum of their
proportional set sizes. With --write, the table replaces the one in PAGE.

A yardstick works on the same files in as many processes, before and after the command, and its
lesser time counts. For traces it inflates their text and runs the kernel that scans it; for a
store, Arrow reads all columns. Its time is that of this work alone, without starting Python.
"""

import argparse
import gzip
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
from timing import scan_of

from fastcomm.formats.stream import blocks, document
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

SECOND = os.sysconf("SC_CLK_TCK")
# Processor time as a multiple of the yardstick's; memory as a multiple of that of FEW ranks.
BARS = {("gzipped JSON", 4096): 1.4, ("store", 4096): 0.6}
MEMORY = {("gzipped JSON", 4096): 1.3, ("store", 4096): 1.3}
FEW = 64
LARGE = 5_000_000_000
SAMPLE = 50_000_000  # bytes of the large trace's yardstick
PAUSE = 0.25  # s between two looks: more often would take time from what is measured
HEAD = ("input", "ranks", "events", "wall", "CPU", "yardstick", "ratio", "memory", "growth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one command took: seconds of the clock and of processors, bytes at the peak."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A command on one input; `yardstick` is in seconds of processors."""

    kind: str
    ranks: int
    events: int
    use: Use
    yardstick: float
    growth: float | None = None  # of memory, from FEW ranks

    @property
    def judged(self):
        """The two ratios, each with its bar; None is unknown, or no bar."""
        key = self.kind, self.ranks
        ratio = self.use.cpu / self.yardstick
        return (ratio, BARS.get(key)), (self.growth, MEMORY.get(key))

    @property
    def holds(self):
        """Whether all ratios are within their bars."""
        return all(None in (ratio, bar) or ratio <= bar for ratio, bar in self.judged)

    def line(self):
        """The row of the table."""
        ratio, growth = (told(*each) for each in self.judged)
        cells = (
            self.kind,
            f"{self.ranks}",
            f"{self.events / 1e6:.1f} M",
            f"{self.use.wall:.1f} s",
            f"{self.use.cpu:.1f} s",
            f"{self.yardstick:.1f} s",
            ratio,
            f"{self.use.memory / 1e6:.0f} MB",
            growth,
        )
        return f"| {' | '.join(cells)} |"


def told(ratio, bar):
    """A ratio as text, with its bar if it has one."""
    if ratio is None:
        return ""
    judgment = "" if bar is None else f" (bar {bar:g}: {'holds' if ratio <= bar else 'MISSED'})"
    return f"{ratio:.2f}{judgment}"


def inflated_and_scanned(path):
    """Seconds of the processor that inflating a trace and scanning its text take."""
    begun = time.process_time()
    deque(blocks(path), maxlen=0)
    inflated = time.process_time() - begun
    scan = scan_of(document(path))
    begun = time.process_time()
    scan()
    return inflated + time.process_time() - begun


def read_by_arrow(path):
    """Seconds of the processor that Arrow takes for all columns of a stored rank."""
    begun = time.process_time()
    pq.read_table(path, use_threads=False)
    return time.process_time() - begun


def in_processes(seconds, paths, workers):
    """The sum of the seconds of all paths, by as many processes as the command has."""
    # Each worker compiles, imports and loads libraries first, outside of the clock.
    context = multiprocessing.get_context("fork")
    seconds(paths[0])
    with context.Pool(workers) as pool:
        return sum(pool.imap_unordered(seconds, paths, chunksize=8))


def used(command, *, code=0, env=os.environ):
    """Run a command in a session of its own and watch all processes of it."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, start_new_session=True, env=env
    )
    cpu, peak = {}, 0
    while process.poll() is None:
        now = list(processes(process.pid))
        cpu.update({pid: ticks for pid, ticks, _ in now})
        peak = max(peak, sum(memory for _, _, memory in now))
        time.sleep(PAUSE)
    if process.returncode != code:
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


def beside(command, seconds, paths, workers):
    """The use of a command, and the lesser of its yardstick before and after it."""
    before = in_processes(seconds, paths, workers)
    use = used(command)
    return use, min(before, in_processes(seconds, paths, workers))


def measured(folder, ranks, workers):
    """The rows of one run: from its traces, and from its store."""
    where, store = traces(folder, ranks), folder / f"store-{ranks}"
    program = [sys.executable, "-m", "fastcomm"]
    many = ["--workers", str(workers)]
    if not (store / "fastcomm.json").exists():
        subprocess.run([*program, "ingest", where, "-o", store, *many], check=True)
    count = events(where)
    for kind, path, seconds, ending in (
        ("gzipped JSON", where, inflated_and_scanned, "gz"),
        ("store", store, read_by_arrow, "parquet"),
    ):
        command = [*program, "metrics", cached(path), "--json", *many]
        paths = sorted(path.glob(f"*.{ending}"))
        use, yardstick = beside(command, seconds, paths, workers)
        yield Row(kind=kind, ranks=ranks, events=count, use=use, yardstick=yardstick)


def large(folder):
    """The row of one trace of 5 GB; its yardstick is that of a smaller one, as many times."""
    path, sample = (
        written(folder / name, size) for name, size in (("large", LARGE), ("sample", SAMPLE))
    )
    with path.open("rb") as file:
        text = 0
        while block := file.read(1 << 24):
            text += block.count(b'"ph":')
    cached(path.parent)
    command = [sys.executable, "-m", "fastcomm", "metrics", path, "--json"]
    use, yardstick = beside(command, inflated_and_scanned, [sample] * 4, 1)
    times = path.stat().st_size / sample.stat().st_size / 4
    return Row(kind="JSON of 5 GB", ranks=1, events=text, use=use, yardstick=yardstick * times)


def written(folder, size):
    """One uncompressed trace of about `size` bytes, written if it is not there yet."""
    path = folder / "rank0.pt.trace.json"
    if not path.exists():
        write(Job.of(8, steps=8), folder, ranks=[0], compress=False, filler_bytes=size)
    return path


def with_growth(rows):
    """The rows, with their memory as a multiple of that of FEW ranks of the same kind."""
    few = {}
    for row in rows:
        if row.ranks == FEW:
            few[row.kind] = row.use.memory
        growth = row.use.memory / few[row.kind] if row.kind in few else None
        yield replace(row, growth=growth)


def main():
    said = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    said.add_argument("--folder", type=Path, default=Path(".cache/scale"))
    said.add_argument("--ranks", default="64,512,4096")
    said.add_argument("--workers", type=int, default=os.cpu_count())
    said.add_argument("--without-large", action="store_true", help="no trace of 5 GB")
    said.add_argument("--write", type=Path, metavar="PAGE")
    words = said.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    good = True
    print(*lines, sep="\n", flush=True)
    sizes = [int(each) for each in words.ranks.split(",") if each]
    rows = (each for ranks in sizes for each in measured(words.folder, ranks, words.workers))
    alone = [] if words.without_large else [words.folder]
    for row in with_growth(chain(rows, map(large, alone))):
        good &= row.holds
        lines.append(row.line())
        print(lines[-1], flush=True)
    if words.write:
        page = words.write.read_text("utf-8")
        table = "\n".join(lines)
        marked = re.compile(r"(?<=<!-- scale -->\n).*?(?=<!-- end of scale -->)", re.DOTALL)
        words.write.write_text(marked.sub(lambda _: f"{table}\n", page), "utf-8")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
