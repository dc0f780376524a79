"""The critical path beside HolisticTraceAnalysis 0.5 on the same file, in one run.

    python bench/compare_hta_critical_path.py TRACE [ANNOTATION]

HTA goes into an environment of its own (.cache/hta). Both read the trace; timed is what comes
after: the graph of one window, its path, and the summary. The summaries are printed: they are
equal but for what HTA has changed since 0.5.
"""

import json
import subprocess
import sys
from time import perf_counter

from compare_hta import python_with_hta

from fastcomm.compat import hta
from fastcomm.critical_path.search import analyze
from fastcomm.formats.opening import open_run
from fastcomm.options import Window

ROUNDS = 3
WITH_HTA = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
begun = time.perf_counter()
graph, success = analysis.critical_path_analysis(rank=0, annotation=sys.argv[2], instance_id=0)
graph.critical_path()
summary = graph.summary()
seconds = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "events": len(graph.trace_df), "summary": dict(summary)}))
"""


def main():
    path, annotation = (*sys.argv[1:], "ProfilerStep")[:2]
    theirs = []
    for _ in range(ROUNDS):
        command = [python_with_hta(), "-c", WITH_HTA, path, annotation]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        theirs.append(json.loads(done.stdout.splitlines()[-1]))
    run = open_run(path)
    trace = run.read(run.ranks[0], "all")
    ours = {}
    for rules, find in (("hta", hta.find_path), ("corrected", analyze)):
        seconds = []
        for _ in range(ROUNDS + 1):
            begun = perf_counter()
            found = find(trace, Window(annotation=annotation))
            summary = found.summary()  # shares by our rules, percent by HTA's
            seconds.append(perf_counter() - begun)
        ours[rules] = {
            "seconds": min(seconds),
            "events": found.about.clipped,
            "summary": summary,
        }
    best = min(theirs, key=lambda each: each["seconds"])
    for name, each in (("HTA 0.5", best), *ours.items()):
        rate = each["events"] / each["seconds"]
        whole = sum(each["summary"].values())
        shares = {key: round(part / whole, 3) for key, part in each["summary"].items()}
        print(f"{name}: {each['seconds']:.3f} s, {rate:,.0f} events/s, {shares}")
    print(f"rules hta are {best['seconds'] / ours['hta']['seconds']:.0f} times as fast as HTA")


if __name__ == "__main__":
    main()
