"""Definitions of the numbers on HTML pages.

A key is the path of the number in the JSON of its command. Where docs/metrics/ defines the key,
the definition here contains the wording of that page, which a test checks.
"""

from dataclasses import dataclass

from fastcomm.idle.causes import BY_CAUSE
from fastcomm.trace.parallelisms import PARALLELISMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Name, meaning and formula of a number."""

    name: str
    meaning: str
    formula: str = ""


def _of(name: str, meaning: str, formula: str = "") -> Definition:
    return Definition(name=name, meaning=meaning, formula=formula)


_TITLES = {row.tag: row.title for row in PARALLELISMS}
_RUN = {
    "timeline.length": _of(
        "Time of the step on all ranks",
        "from the first begin of the step on any rank to its last end, on aligned clocks",
    ),
    "ranks": _of("Ranks", "the ranks that were read"),
    "iterations": _of(
        "Iterations",
        "number of distinct iteration numbers over all ranks; null where no input has times",
    ),
    "link_bandwidth": _of(
        "Link",
        "bandwidth of one GPU's link in one direction, in bytes per second; null without "
        "--link-bandwidth",
    ),
    "iteration.mean_ns": _of(
        "Iteration time",
        "mean over all (iteration, rank); the specification's iteration_time_mean",
        "stop(i, r) − start(i, r)",
    ),
    "iteration.p99_ns": _of(
        "Iteration time, p99",
        "99th percentile over all (iteration, rank); the specification's iteration_time_p99",
    ),
    "iteration.rank_ns": _of(
        "Iteration time of a rank",
        "mean over the iterations of one rank. Ranks that wait for "
        "each other have equal iteration times, so the slowest rank is rarely the cause.",
    ),
    "iteration.above": _of(
        "Above the median", "the rank's value divided by the median of all ranks, minus 1"
    ),
}
_EXPOSED_TAG = "communication of this tag alone runs, and no compute kernel"
_BREAKDOWN = {
    "exact.compute": _of(
        "Compute", "the time in which a compute kernel runs, with or without communication"
    ),
    **{
        f"exact.exposed_{tag}": _of(
            f"Exposed {tag}", f"the time in which {_EXPOSED_TAG} ({name})"
        )
        for tag, name in _TITLES.items()
    },
    "exact.exposed_mixed": _of(
        "Exposed, mixed",
        "the time in which communication of two or more tags runs, and no compute kernel",
    ),
    "exact.exposed": _of(
        "Exposed communication",
        "the time in which communication runs and no compute kernel does: an upper bound of "
        "what faster communication could save",
        "sum of all exposed shares of the exact partition",
    ),
    "exposed.wait": _of(
        "Exposed waiting",
        "exposed communication before the last rank of a collective has arrived, as a share of "
        "the step",
    ),
    "exposed.transfer": _of(
        "Exposed transfer",
        "exposed communication after the last rank of a collective has arrived, as a share of "
        "the step: what faster links could save at most",
    ),
    "throughput.tokens": _of(
        "Tokens per second",
        "tokens of a step of all ranks, from --tokens-per-step, divided by the mean step",
    ),
    "flops.mfu": _of(
        "MFU", "FLOPs of the model, without recomputation, as a share of the peak of the GPU"
    ),
    "flops.hfu": _of(
        "HFU", "FLOPs that the device executes, as a share of the peak of the GPU"
    ),
    "exact.memcpy": _of("Copies", "the time in which only copies or memsets run"),
    "exact.idle": _of("Idle", "the time in which nothing runs on the device"),
    **{
        f"idle.{cause}": _of(f"Idle, {own.text}", f"idle time in which it waits {own.awaited}")
        for cause, own in BY_CAUSE.items()
    },
    "idle.ns": _of(
        "Per step", "idle time with this evidence, mean over the steps of all ranks"
    ),
    "idle.ranks": _of("Ranks", "number of ranks with this evidence"),
    "spec.compute": _of(
        "Compute, specification formula",
        "time without communication, including idle time",
        "iteration − union of all communication",
    ),
    "spec.comm": _of(
        "Communication, specification formula",
        "summed durations; may exceed 1",
        "sum of the durations of the tag's events / iteration",
    ),
    "spec.idle": _of(
        "Idle, specification formula",
        "the rest: union minus sum of communication, negative where communication overlaps "
        "itself. This is not the time in which the GPU is idle.",
        "iteration − compute − sum of all communication",
    ),
    "spec": _of(
        "Specification formula",
        "share by the specification's formulas, which sum durations, so that time in which two "
        "events run counts twice",
    ),
    "exact": _of(
        "Exact share",
        "every nanosecond of an iteration belongs to the first category that applies: compute, "
        "communication, copies, idle. The shares add up to 1.",
        "time of the category / iteration time, both summed over all (iteration, rank)",
    ),
    "exact.ns": _of("Per step", "the exact share times the mean iteration time"),
}
_WINDOWS = {
    "windows.count": _of("Windows", "number of windows of all ranks and iterations"),
    "windows.window_ns": _of(
        "Window",
        "time from the stop of a phase to the start of the next; a phase is a maximal run of "
        "communication of one tag. Negative where phases overlap.",
        "start(P2) − stop(P1)",
    ),
    **{
        f"windows.{key}": _of(
            f"Window, {name}", "mean, median and 95th percentile of the windows"
        )
        for key, name in (("mean_ns", "mean"), ("p50_ns", "median"), ("p95_ns", "p95"))
    },
}
_BANDWIDTH = {
    "bandwidth.avg_bw": _of(
        "Bandwidth", "mean of bw over events", "bw = bytes / duration, waiting included"
    ),
    "bandwidth.avg_util": _of("Utilization", "mean of util over events", "util = bw / link"),
    "bandwidth.p95_util": _of("Utilization, p95", "95th percentile of util over events"),
    "bandwidth.global_avg_util": _of(
        "Utilization, overall",
        "sum of bytes / sum of durations / link bandwidth. With payload bytes it may exceed "
        "100 %: only bus bytes cross a link.",
    ),
    "bandwidth.total_bytes": _of("Bytes", "sum of the known bytes"),
    "bandwidth.avg_bus_bw": _of(
        "Bus bandwidth",
        "mean of bus bytes / duration, independent of --bytes. Bus bytes are the bytes that "
        "cross each GPU's link; the duration includes waiting for the last rank.",
    ),
    "bandwidth.avg_bus_util": _of(
        "Bus utilization", "avg_bus_bw / link bandwidth: the physical utilization"
    ),
    "bandwidth.events": _of("Events", "number of events of the tag"),
    "bandwidth.events_without_bytes": _of(
        "Unknown size",
        "number of events of unknown size, excluded from bandwidths and sums of bytes",
    ),
    "collectives.size_from": _of(
        "Size from",
        "a power of two: the class has sizes from this up to the next, in the bytes that "
        "--bytes selects",
    ),
    "collectives.count": _of("Events", "number of events with a known rate"),
    "collectives.p50_bus_bw": _of(
        "Bus bandwidth, median",
        "median of bus bytes / duration; null where the group size is unknown",
    ),
    "collectives.group_size": _of(
        "Group", "the operation, and the number of ranks that take part"
    ),
}
_VOLUME = {
    "volume.comm_bytes": _of(
        "Volume",
        "bytes of all events of all ranks. A collective counts on each of its ranks, so this "
        "is not the traffic on links.",
    ),
    "volume.comm_events": _of("Events", "number of events, including those of unknown size"),
    "volume.bytes_per_iteration": _of("Bytes per iteration", "bytes / iterations"),
    "volume.bytes_per_step_per_gpu": _of(
        "Bytes per step and GPU", "bytes / (iterations × ranks)"
    ),
}
_OVERLAP = {
    "overlap.average_overlap_ratio": _of(
        "Overlap",
        "mean over all (iteration, rank) that communicate; null where none does: the share of "
        "communication that compute overlaps",
        "union(communication) ∩ union(compute) / union(communication)",
    ),
    "overlap.by_tag": _of(
        "Overlap of a tag",
        "overlap ratio of each tag; null if unknown; tags without communication are absent",
    ),
    "overlap.overlapped_ns": _of(
        "Overlapped", "communication of the tag under compute, per step and rank"
    ),
    "overlap.not_overlapped_ns": _of(
        "Not overlapped",
        "communication of the tag without compute, per step and rank. Communication of "
        "another tag may run at the same time.",
    ),
}
_GROUPS = {
    "groups.size": _of("Ranks each", "number of ranks of one such group; null where unknown"),
    "groups.on_ranks": _of("On ranks", "number of ranks that have such a group"),
    "groups.events": _of(
        "Events",
        "number of its communication events in the whole trace, in an iteration or not",
    ),
}
_WAITS = "time it waits and transfers, per step"
_RATES = "bandwidth in bytes per second, median bandwidth of the other groups, and their ratio"
_COST = (
    "for a cause, the time that a fix saves per step (ranks that are late together share this "
    "time); for a symptom, its time per step. share is the cost as a share of the mean step"
)
_ACROSS = {
    "waits.wait_ns": _of(
        "Waits",
        f"{_WAITS}: the wait is from its own arrival at a collective to the last arrival",
    ),
    "waits.transfer_ns": _of(
        "Transfers", f"{_WAITS}: the transfer is from the last arrival to the end"
    ),
    "waits.wait_caused_ns": _of(
        "Wait caused",
        "waiting of other ranks because this rank arrives last, per step: its arrival minus "
        "the previous arrival, summed over collectives, but no longer than the time since its "
        "stream ended the communication of the group before",
    ),
    "waits.later_ns": _of(
        "Later",
        "its arrival minus the lower median of the other arrivals, summed, per step; negative "
        "means earlier",
    ),
    "waits.last_share": _of(
        "Arrives last",
        "number and share of its collectives in which this rank alone arrived last",
    ),
    "skew.count": _of("Collectives", "number of collectives matched over several ranks"),
    "skew.skew_ns": _of("Skew", "time from the first arrival at a collective to the last"),
    "skew.transfer_ns": _of("Transfer", "time from the last arrival to the median of the ends"),
    "skew.wait_ns": _of("Waiting", "waits of all ranks, per step"),
    "skew.wait_share": _of("Share", "share of waiting in the time of these collectives"),
    "links.bus_bw": _of("Bus bandwidth of a link", f"{_RATES}; without waiting for late ranks"),
    "links.peers_bus_bw": _of("Peers", f"{_RATES}; peers are the other groups of the class"),
    "links.ratio": _of("Of its peers", f"{_RATES}; below 1 is slower than the peers"),
    "links.excess_ns": _of(
        "Lost",
        "extra transfer time per step compared with transfers at the bandwidth of the other "
        "groups",
    ),
    "findings.cost_ns": _of("Cost", _COST),
    "findings.share": _of("Of the step", _COST),
    "findings.confidence": _of(
        "Confidence",
        "high: matched across ranks, and more than three times the standard deviation between "
        "steps; medium: more than twice the standard deviation; low: one rank, one step, or "
        "less than that, and symptoms of runs on the host, whose threads also wait for cores",
    ),
    "findings.evidence": _of(
        "Evidence", "the numbers behind the finding; null where they do not apply to its kind"
    ),
}
_PATH = {
    "path.length_ns": _of(
        "Critical path",
        "the chain of work that determines the time of the step: the step becomes shorter only "
        "if work on this chain becomes shorter",
    ),
    "path.share": _of("Share of the path", "time of the class divided by the path's length"),
    "path.time_ns": _of("On the path", "time of the path's edges"),
    "path.self_ns": _of("Own time", "time of the path in the event itself, summed by name"),
    "path.edges": _of("Edges", "number of edges of the path that are own time of the event"),
    "path.coverage": _of(
        "Coverage", "path length divided by the time from the first event to the last"
    ),
    "path.on_path_ns": _of("On the path", "time of the path on this rank"),
    "path.wait_ns": _of("Waits", "time in collectives before the last rank arrives"),
    "path.transfer_ns": _of("Transfers", "time in collectives after the last rank arrives"),
    "path.arrived_last": _of("Arrived last", "collectives at which this rank arrived last"),
    "path.wait_caused_ns": _of(
        "Wait caused",
        "its arrival minus the previous arrival, summed over the collectives where it was last",
    ),
    "path.crossings": _of("Crossings", "how often the path goes from one rank to another"),
    "whatif.span_ns": _of(
        "Step",
        "length of the replayed window with the edit; each event begins as early as possible",
    ),
    "whatif.share": _of("Share of the original", "time with edits divided by time without"),
    "whatif.error": _of(
        "Replay error", "largest error of a replay without edits, of any event"
    ),
    "whatif.saved": _of(
        "Saved", "how much shorter the replayed step of the critical path is with the edit"
    ),
    "whatif.speedup": _of(
        "Speedup", "the window without edits divided by the window with edits"
    ),
}
_REPLAY = {
    "replay.step_ns": _of("Replayed", "mean time of a step in the replay"),
    "replay.measured_ns": _of("Measured", "mean time of a step in the trace"),
    "replay.error": _of(
        "Error", "relative difference between the replayed and the measured step time"
    ),
    "replay.cost_ns": _of(
        "On the path",
        "time of the operation on the replayed critical path, or of the wait after it: for a "
        "launch, a gap, or a pipeline bubble",
    ),
    "replay.saved_ns": _of(
        "Shorter by", "how much shorter the step is if the operation takes no time"
    ),
    "replay.what_if_ns": _of("What if", "the replayed step with the edits"),
    "stragglers.slowdown": _of(
        "Slowdown",
        "step time divided by the step time if every operation took the ideal time of its type",
    ),
    "stragglers.launch": _of(
        "Launch delays", "how much longer a recorded step takes than its replay without delays"
    ),
    "stragglers.step_ns": _of("Step", "mean step time with the measured operations"),
    "stragglers.ideal_ns": _of("Ideal step", "mean step time with ideal operations"),
    "stragglers.alone": _of(
        "Slowdown caused alone",
        "step time with only these operations as measured and all others ideal, divided by the "
        "ideal step time",
    ),
    "stragglers.worker": _of(
        "Slowdown of a worker",
        "the smaller of the slowdowns of its data parallel rank and its stage",
    ),
    "stragglers.worst": _of(
        "Worst ranks (M_W)", "share of the slowdown gone if the worst 3 % of ranks are ideal"
    ),
    "stragglers.last_stage": _of(
        "Last stage (M_S)", "share of the slowdown gone if the last stage is ideal"
    ),
}
_ISP = {
    "isp.tgs": _of("Tokens/s/GPU", "tokens per second and GPU"),
    "isp.latency": _of("Step", "predicted step time"),
    "isp.memory": _of(
        "Memory", "memory that the strategy needs on the fullest GPU, in binary units"
    ),
    "isp.candidates": _of("Candidates", "number of valid strategies"),
    "isp.feasible": _of(
        "Feasible", "number of strategies that fit in memory and suit the batch"
    ),
    "isp.rejected": _of("Rejected", "number of rejected strategies, by the first reason"),
    "isp.scaling": _of("Scaling", "tokens/s/GPU divided by those of the smallest world size"),
    "isp.gpus": _of("GPUs", "number of GPUs of the job"),
    "isp.pp": _of("Pipeline", "number of pipeline stages"),
    "isp.sp": _of("Sequence", "number of shards of a sequence, or of tensors"),
    "isp.wp": _of("Weights", "number of shards of the weights"),
    "isp.gp": _of("Gradients", "number of shards of the gradients"),
    "isp.zp": _of("Optimizer", "number of shards of the optimizer states"),
    "isp.micro": _of("Micro-batches", "number of micro-batches per step"),
    "isp.mfu": _of("MFU", "model FLOPs over the bf16 peak, with causal attention"),
    "isp.virtual": _of("Virtual stages", "pipeline stages on each GPU"),
    "isp.etp": _of("Tensor of experts", "number of shards of each expert's tensors"),
    "isp.micro_size": _of("Sequences each", "number of sequences of a micro-batch"),
    "isp.term": _of("Term", "predicted time, or memory of the fullest rank"),
    "isp.share": _of("Share", "of the step time, or of the memory"),
    "isp.changed": _of("Would be", "tokens/s/GPU of the best strategy with this change"),
}
_STATISTICS = {
    "stats.step": _of("Step", "from the first operator of a step to the end of the last"),
    "stats.steps": _of("Steps", "number of steps that all ranks have"),
    "stats.rank": _of("Step of a rank", "mean over the steps of the rank's own times"),
    "stats.part": _of("Part", "sum of the operators of this part, in the mean step"),
    "stats.operations": _of("Operations", "number of names, each of one rank"),
    "stats.count": _of("Events", "number of events of all steps"),
    "stats.total": _of("Total", "sum of the durations over all steps"),
    "stats.mean": _of("Mean", "mean duration"),
    "stats.median": _of("Median", "median of the durations"),
    "stats.shortest": _of("Shortest", "the shortest duration"),
    "stats.longest_event": _of("Longest", "the longest duration"),
    "stats.longest": _of("Longest operation", "the largest mean of an operation"),
    "stats.deviation": _of("Deviation", "standard deviation of the durations"),
}
_COMPARED = {
    "compare.effect": _of("Effect", "time or value after minus the one before"),
    "compare.cost": _of("Cost", "time that a cause costs in the mean step"),
    "compare.part": _of("Part", "part of the exact partition of the mean step"),
    "compare.kernel": _of("Time", "time of all calls in the mean step of a rank"),
    "compare.calls": _of("Calls", "calls in the mean step of a rank"),
    "compare.value": _of("Value", "the metric of the run, as in its JSON"),
}
_KERNELS = {
    "kernels.share": _of("Of step", "time in the mean step of a rank, as share of that step"),
    "kernels.total": _of("Total", "sum of the durations over all ranks and steps"),
    "kernels.count": _of("Count", "number of kernels and copies of all ranks and steps"),
    "kernels.mean": _of("Mean", "mean duration"),
    "kernels.median": _of("Median", "median of the durations"),
    "kernels.p95": _of("p95", "95th percentile of the durations"),
    "kernels.max": _of("Longest", "the longest duration"),
    "kernels.slowdown": _of(
        "Slowest rank",
        "the rank with the longest total among ranks with equally many such kernels, and by "
        "how much that is above the median of the others",
    ),
    "kernels.flops": _of("TFLOP/s", "rate of the FLOPs of operators whose shapes are recorded"),
    "kernels.peak": _of("Of peak", "this rate as share of the GPU's peak in its precision"),
    "kernels.memory": _of(
        "Of memory", "bytes per second, as share of the bandwidth that large copies reach"
    ),
    "kernels.queue": _of(
        "Queued",
        "number of kernels that are launched and have not begun, as mean over the time from "
        "the first launch of the stream to the last start",
    ),
    "kernels.delay": _of(
        "Launch delay", "mean time from the end of the launching call to the start of the work"
    ),
    "kernels.by_rank": _of(
        "Beside the median",
        "time of a category in the mean step of a rank, divided by the median over all ranks",
    ),
}
_DISPATCH = {
    "dispatch.total_s": _of("Dispatch", "dispatch time, summed over all layers"),
    "dispatch.combine_s": _of("Combine", "combine time (the way back), summed over all layers"),
    "dispatch.optimal_s": _of("Best possible", "lower bound for every schedule"),
    "dispatch.times_optimal": _of("× best", "dispatch as a multiple of the best possible"),
    "dispatch.times_bound": _of(
        "× class bound", "dispatch as a multiple of the lower bound for schedules of its class"
    ),
    "dispatch.inter_bytes": _of("Between nodes", "bytes that cross between nodes"),
    "dispatch.load": _of(
        "Load", "tokens that a GPU sends or receives over one kind of link, over all layers"
    ),
    "dispatch.most_by_mean": _of("Max / mean", "tokens of the most loaded GPU, by the mean"),
    "dispatch.after_s": _of("After", "dispatch with the new placement of experts"),
    "dispatch.speedup": _of("Speedup", "dispatch before divided by dispatch after"),
    "dispatch.imbalance": _of(
        "Imbalance", "token copies of the most loaded GPU divided by the mean"
    ),
}
GLOSSARY: dict[str, Definition] = {
    **_RUN, **_BREAKDOWN, **_WINDOWS, **_BANDWIDTH, **_VOLUME, **_OVERLAP, **_GROUPS,
    **_ACROSS, **_PATH, **_REPLAY, **_ISP, **_KERNELS, **_COMPARED, **_STATISTICS, **_DISPATCH,
}  # fmt: skip
