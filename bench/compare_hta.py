"""fastcomm beside HolisticTraceAnalysis 0.5 on the same file, in one run.

    python bench/compare_hta.py [TRACE]

HTA goes into an environment of its own (.cache/hta). Both read the trace and give the overlap
of communication and compute and the breakdown of time; each is a whole process, timed from
outside, in turn. Without TRACE it is a made-up rank of 50 MB.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

ROUNDS = 3
HTA = Path(__file__).parents[1] / ".cache" / "hta"
WITH_HTA = """
import sys, time, warnings
warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
begun = time.perf_counter()
words = {"trace_dir": "", "include_last_profiler_step": True}
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, **words)
loaded = time.perf_counter()
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_temporal_breakdown(visualize=False)
print(loaded - begun, time.perf_counter() - loaded)
"""


def python_with_hta():
    """The interpreter of an environment with HTA, made on the first call."""
    python = HTA / "bin" / "python"
    if not python.exists():
        venv.create(HTA, with_pip=True)
        # HTA 0.5 writes integers that pandas 3 refuses.
        wanted = ["HolisticTraceAnalysis==0.5.0", "networkx", "pandas<3", "setuptools<81"]
        subprocess.run([python, "-m", "pip", "install", "-qqq", *wanted], check=True)
    return python


def timed(command):
    """Seconds of the whole process, its peak memory in MB, and what it prints."""
    begun = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[0]} ended with {status}")
    return perf_counter() - begun, usage.ru_maxrss / 1024, printed


def main():
    with tempfile.TemporaryDirectory() as folder:
        given = [Path(word) for word in sys.argv[1:2]]
        path = given[0] if given else made_up(Path(folder))
        ours = [sys.executable, "-m", "fastcomm", "metrics", "--json", path]
        theirs = [python_with_hta(), "-c", WITH_HTA, path]
        timed(ours)
        rounds = [(timed(ours), timed(theirs)) for _ in range(ROUNDS)]
    for name, place in (("fastcomm", 0), ("HTA 0.5", 1)):
        seconds, memory, printed = min(pair[place] for pair in rounds)
        inside = ""
        if place:
            load, rest = map(float, printed.split()[-2:])
            inside = f" (load {load:.2f} s, overlap and breakdown {rest:.2f} s, rest imports)"
        print(f"{name}: {seconds:.2f} s, {memory:.0f} MB at most{inside}")
    ratios = sorted(hta[0] / own[0] for own, hta in rounds)
    print(
        f"HTA takes {ratios[len(ratios) // 2]:.1f} times as long as fastcomm, imports included"
    )


def made_up(folder):
    """One rank of a job of 8, with work and host events in a natural mix."""
    (path,) = write(Job.of(ranks=8), folder, ranks=[0], filler_bytes=50_000_000, compress=False)
    return path


if __name__ == "__main__":
    main()
