"""What every number on a page means, said once.

A key is the place of the number in the JSON of its command. Where docs/metrics/ defines the
key, the words here contain those of the page; a test holds them together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The name of a number, what it means, and how it is computed."""

    name: str
    says: str
    formula: str = ""


def _of(name: str, says: str, formula: str = "") -> Definition:
    return Definition(name=name, says=says, formula=formula)


_TAGS = {
    "DP": "data parallel",
    "TP": "tensor parallel",
    "PP": "pipeline parallel",
    "EP": "expert parallel",
    "CP": "context parallel",
    "OTHER": "unattributed",
}

_RUN = {
    "ranks": _of("Ranks", "the ranks that were read"),
    "iterations": _of(
        "Iterations",
        "distinct iteration numbers over all ranks; null where no input has times",
    ),
    "link_bandwidth": _of(
        "Link", "bytes per second; null where nobody said it. Of one GPU's link, one direction."
    ),
    "iteration.mean_ns": _of(
        "Iteration time",
        "mean over all (iteration, rank); the specification's iteration_time_mean",
        "stop(i, r) − start(i, r)",
    ),
    "iteration.p99_ns": _of(
        "Iteration time, p99", "99th percentile over the same; iteration_time_p99"
    ),
    "iteration.rank_ns": _of(
        "Iteration time of a rank",
        "mean over the iterations of one rank. Ranks that wait for "
        "each other take equally long, so the slowest is rarely the cause.",
    ),
    "iteration.above": _of(
        "Above the median", "the rank's value by the median of all ranks, less one"
    ),
}

_EXACT_SAYS = "no compute kernel runs, and communication of this one tag does"
_BREAKDOWN = {
    "exact.compute": _of(
        "Compute", "the time in which a compute kernel runs, whatever else does"
    ),
    **{
        f"exact.exposed_{tag}": _of(
            f"Exposed {tag}", f"the time in which {_EXACT_SAYS} ({name})"
        )
        for tag, name in _TAGS.items()
    },
    "exact.exposed_mixed": _of(
        "Exposed, mixed",
        "the time in which no compute kernel runs, and communication of two tags or more does",
    ),
    "exact.exposed": _of(
        "Exposed communication",
        "the time in which no compute kernel runs and communication does: an upper bound of "
        "what faster communication could save",
        "sum of all exposed shares of the exact partition",
    ),
    "exact.memcpy": _of("Copies", "the time in which only copies or memsets run"),
    "exact.idle": _of("Idle", "the time in which nothing runs on the device"),
    "spec.compute": _of(
        "Compute, by the formula",
        "all time without communication, whatever happens in it",
        "iteration − union of all communication",
    ),
    "spec.comm": _of(
        "Communication, by the formula",
        "summed durations; may exceed 1",
        "sum of the durations of the tag's events / iteration",
    ),
    "spec.idle": _of(
        "Idle, by the formula",
        "what is left: union minus sum of communication, negative where communication overlaps "
        "itself. It is not the time in which the GPU idles.",
        "iteration − compute − sum of all communication",
    ),
    "spec": _of(
        "Formula",
        "the share by the specification's formulas: sums of durations, which count a time "
        "twice in which two events run",
    ),
    "exact": _of(
        "Exact share",
        "every nanosecond of an iteration goes to the first category that fits: compute hides "
        "communication, both hide copies. The shares add up to 1.",
        "time of the category / summed iteration time, over all (iteration, rank)",
    ),
    "exact.ns": _of("A step", "the exact share of the mean iteration time"),
}

_WINDOWS = {
    "windows.count": _of("Windows", "windows of all ranks and iterations"),
    "windows.window_ns": _of(
        "Window",
        "from the stop of a phase to the start of the next; a phase is a longest run of "
        "communication of one tag. Negative: they overlap.",
        "start(P2) − stop(P1)",
    ),
    **{
        f"windows.{key}": _of(f"Window, {name}", "their mean, median and 95th percentile")
        for key, name in (("mean_ns", "mean"), ("p50_ns", "median"), ("p95_ns", "p95"))
    },
}

_BANDWIDTH = {
    "bandwidth.avg_bw": _of(
        "Bandwidth", "mean of bw over events", "bw = bytes / duration, waiting included"
    ),
    "bandwidth.avg_util": _of("Utilisation", "mean of util over events", "util = bw / link"),
    "bandwidth.p95_util": _of("Utilisation, p95", "95th percentile of util over events"),
    "bandwidth.global_avg_util": _of(
        "Utilisation, overall",
        "sum of bytes / sum of durations / link bandwidth. With payload bytes it may exceed "
        "100 %: only bus bytes are what crosses a link.",
    ),
    "bandwidth.total_bytes": _of("Bytes", "sum of the known bytes"),
    "bandwidth.avg_bus_bw": _of(
        "Bus bandwidth",
        "mean of bus bytes / duration, whatever --bytes says. Bus bytes are what crosses each "
        "GPU's link; the duration includes the wait for the slowest rank.",
    ),
    "bandwidth.avg_bus_util": _of(
        "Bus utilisation",
        "the same by the link bandwidth: bus bytes / duration / link, the physical one",
    ),
    "bandwidth.events": _of("Events", "all events of the tag"),
    "bandwidth.events_without_bytes": _of(
        "Unknown size", "those of unknown size: in no bandwidth, and in no sum of bytes"
    ),
    "collectives.size_from": _of(
        "Size from", "a power of two: sizes from it up to the next, by --bytes"
    ),
    "collectives.count": _of("Events", "events that have a rate"),
    "collectives.p50_bus_bw": _of(
        "Bus bandwidth, median",
        "median of bus bytes / duration; null where no group size is known",
    ),
    "collectives.group_size": _of("Group", "the operation, and how many ranks take part"),
}

_VOLUME = {
    "volume.comm_bytes": _of(
        "Volume",
        "bytes of all events of all ranks. A collective counts once a rank: this is no "
        "traffic on links.",
    ),
    "volume.comm_events": _of("Events", "how many events, those of unknown size included"),
    "volume.bytes_per_iteration": _of("Bytes an iteration", "bytes / iterations"),
    "volume.bytes_per_step_per_gpu": _of(
        "Bytes a step and GPU", "bytes / (iterations × ranks)"
    ),
}

_OVERLAP = {
    "overlap.average_overlap_ratio": _of(
        "Overlap",
        "mean over all (iteration, rank) that communicate; null where none does: the share of "
        "communication that runs under compute",
        "union(communication) ∩ union(compute) / union(communication)",
    ),
    "overlap.by_tag": _of(
        "Overlap of a tag",
        "the same for the communication of one tag alone; tags that do not communicate are "
        "absent, null is unknown",
    ),
    "overlap.hidden_ns": _of(
        "Hidden", "communication of the tag under compute: mean of a step and rank"
    ),
    "overlap.open_ns": _of(
        "Not hidden",
        "communication of the tag without compute: mean of a step and rank. Communication of "
        "another tag may run at the same time.",
    ),
}

_GROUPS = {
    "groups.size": _of("Ranks each", "ranks of one such group; null where unknown"),
    "groups.on_ranks": _of("On ranks", "ranks that have such a group"),
    "groups.events": _of(
        "Events", "their communication in the whole trace, in an iteration or not"
    ),
}

_WAITS = "what it waits and transfers, a step"
_RATES = "bytes per second, the median of the other groups, and the one by the other"
_COST = (
    "of a cause what a step gains if it is fixed (ranks that are late together share it), of "
    "a symptom its time; and the share of the mean step"
)
_ACROSS = {
    "waits.wait_ns": _of(
        "Waits", f"{_WAITS}: the wait is from its own arrival in a collective to the last one"
    ),
    "waits.transfer_ns": _of(
        "Transfers", f"{_WAITS}: the transfer is from the last arrival to the end"
    ),
    "waits.wait_caused_ns": _of(
        "Wait caused",
        "how long others wait in collectives because this rank arrives last, per step: own "
        "arrival less that of the rank before it",
    ),
    "waits.later_ns": _of(
        "Later",
        "own arrival less the lower median of the others, summed, a step; negative: earlier",
    ),
    "waits.last_share": _of(
        "Comes last", "how often it came last, and alone: share of its collectives"
    ),
    "skew.count": _of("Collectives", "those that several ranks were matched in"),
    "skew.skew_ns": _of("Skew", "from the first arrival in a collective to the last"),
    "skew.transfer_ns": _of("Transfer", "from the last arrival to the median of the ends"),
    "skew.wait_ns": _of("Waiting", "all waits of all ranks, a step"),
    "skew.wait_share": _of("Share", "waiting by the time in these collectives"),
    "links.bus_bw": _of(
        "Bus bandwidth of a link", f"{_RATES}; without the wait for late ranks"
    ),
    "links.peers_bus_bw": _of("Peers", f"{_RATES}; peers are the other groups of the class"),
    "links.ratio": _of("Of its peers", f"{_RATES}; less than 1 is slower than they are"),
    "links.excess_ns": _of(
        "Lost", "what its transfers take longer than at the rate of the others, a step"
    ),
    "findings.cost_ns": _of("Cost", _COST),
    "findings.share": _of("Of the step", _COST),
    "findings.confidence": _of(
        "Confidence",
        "high: matched across ranks, and above three times the spread between steps; medium: "
        "above the spread; low: one rank, one step, or within the spread",
    ),
    "findings.evidence": _of(
        "Evidence",
        "the numbers that the finding rests on; null is what does not apply to its kind",
    ),
}

_PATH = {
    "path.length_ns": _of(
        "Critical path",
        "the chain of work that sets the time of the step: to make the step shorter, something "
        "on it has to become shorter",
    ),
    "path.share": _of("Share of the path", "time of the class by the length of the path"),
    "path.time_ns": _of("On the path", "time that edges of the path take"),
    "path.self_ns": _of("Own time", "what the path spends in the event itself, summed by name"),
    "path.edges": _of("Edges", "how many steps of the path are its own time"),
    "path.coverage": _of(
        "Covered", "length of the path by the time from the first event to the last"
    ),
    "path.on_path_ns": _of("On the path", "how long the path is on this rank"),
    "path.wait_ns": _of("Waits", "time in collectives before the last rank has come"),
    "path.transfer_ns": _of("Transfers", "time in collectives after the last rank has come"),
    "path.arrived_last": _of("Came last", "at how many collectives this rank was the last"),
    "path.held_up_ns": _of(
        "Wait caused", "by how much all others could have begun earlier, were it in time"
    ),
    "path.crossings": _of("Crossings", "how often the path goes from rank to rank"),
    "whatif.span_ns": _of(
        "Step",
        "how long the replayed window takes with the edit, each event as early as it can",
    ),
    "whatif.share": _of("Of today", "the edited window by the window without edits"),
    "whatif.error": _of(
        "Replay error", "the worst node of a replay without edits beside its measured time"
    ),
    "whatif.speedup": _of("Speed-up", "the window today by the edited window"),
}

_REPLAY = {
    "replay.step_ns": _of("Replayed", "mean time of a step in the replay"),
    "replay.measured_ns": _of("Measured", "mean time of a step in the trace"),
    "replay.error": _of(
        "Error", "the replayed step time beside the measured, as a share of it"
    ),
    "replay.cost_ns": _of(
        "On the path",
        "what the operation adds to the replayed critical path, or the wait after it: for a "
        "launch, a gap, or a pipeline bubble",
    ),
    "replay.saved_ns": _of(
        "Shorter by", "how much the step shrinks if the operation takes no time"
    ),
    "replay.what_if_ns": _of("What if", "the replayed step with the changes asked for"),
    "stragglers.slowdown": _of(
        "Slowdown",
        "how much longer a step takes than if every operation took the ideal time of its type",
    ),
    "stragglers.launch": _of(
        "Launch delays", "how much longer a recorded step takes than its operations replayed"
    ),
    "stragglers.step_ns": _of("Step", "mean time of a step, its operations as measured"),
    "stragglers.ideal_ns": _of("Ideal step", "mean time of a step of ideal operations"),
    "stragglers.alone": _of(
        "Slowdown it alone brings",
        "the step with these operations as measured and all others ideal, by the ideal step",
    ),
    "stragglers.worker": _of(
        "Slowdown of a worker", "the smaller of the slowdowns of its data rank and its stage"
    ),
    "stragglers.worst": _of(
        "Worst ranks (M_W)",
        "share of the slowdown that goes if the worst 3 % of ranks are ideal",
    ),
    "stragglers.last_stage": _of(
        "Last stage (M_S)", "share of the slowdown that goes if the last stage is ideal"
    ),
}

_ISP = {
    "isp.tgs": _of("TGS", "tokens a GPU trains in a second"),
    "isp.latency": _of("Step", "time of a step by the cost model"),
    "isp.memory": _of("Memory", "what the strategy needs on the fullest GPU, binary units"),
    "isp.candidates": _of("Candidates", "strategies that can exist"),
    "isp.feasible": _of("Feasible", "strategies that fit in memory and suit the batch"),
    "isp.rejected": _of("Rejected", "strategies that fell out, by the first reason"),
    "isp.scaling": _of(
        "Scaling", "tokens a GPU and second by those of the smallest world size"
    ),
    "isp.gpus": _of("GPUs", "GPUs of the whole job"),
    "isp.pp": _of("Pipeline", "pipeline stages"),
    "isp.sp": _of("Sequence", "shards of a sequence, or of tensors"),
    "isp.wp": _of("Weights", "shards of the weights"),
    "isp.gp": _of("Gradients", "shards of the gradients"),
    "isp.zp": _of("Optimizer", "shards of the optimizer states"),
    "isp.micro": _of("Micro-batches", "micro-batches of a step"),
    "isp.changed": _of("Would be", "tokens a GPU and second of the best, were it so"),
}

_DISPATCH = {
    "dispatch.total_s": _of("Dispatch", "time of all layers, one after the other"),
    "dispatch.combine_s": _of("Combine", "time of the way back of all layers"),
    "dispatch.optimal_s": _of("Best possible", "what no schedule beats"),
    "dispatch.times_optimal": _of("× best", "dispatch as a multiple of the best possible"),
    "dispatch.times_bound": _of(
        "× class bound", "dispatch as a multiple of what no schedule of its class beats"
    ),
    "dispatch.inter_bytes": _of("Between nodes", "bytes that cross between nodes"),
    "dispatch.load": _of(
        "Load", "tokens that a GPU sends or receives over one kind of link, of all layers"
    ),
    "dispatch.most_by_mean": _of("Most by mean", "the most loaded GPU's tokens by the mean"),
    "dispatch.after_s": _of("After", "dispatch with the experts placed anew"),
    "dispatch.speedup": _of("Speed-up", "dispatch before by dispatch after"),
    "dispatch.imbalance": _of("Imbalance", "token copies of the most loaded GPU by the mean"),
}

GLOSSARY: dict[str, Definition] = {
    **_RUN, **_BREAKDOWN, **_WINDOWS, **_BANDWIDTH, **_VOLUME, **_OVERLAP, **_GROUPS,
    **_ACROSS, **_PATH, **_REPLAY, **_ISP, **_DISPATCH,
}  # fmt: skip
