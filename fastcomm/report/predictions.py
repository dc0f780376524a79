"""Steps that a trial did not run: on a terminal and as JSON."""

from typing import Any

from fastcomm.replay.daydream import BANDWIDTH
from fastcomm.replay.predictions import Predictions
from fastcomm.report.console import plain_console, say
from fastcomm.units import format_ns

_MS = 1e6
_MOST = 8


def to_dict(found: Predictions) -> dict[str, Any]:
    """What was predicted, in ms; nothing of what was not asked for."""
    said: dict[str, Any] = {}
    if found.daydream is not None:
        said["daydream"] = {
            "step_end_ms": {pid: end / _MS for pid, end in found.daydream.by_pid().items()},
            "bandwidth_bytes_per_s": BANDWIDTH,
        }
    if found.hosts is not None:
        said["other_hosts"] = {
            "hosts": len(found.hosts.by_pid()),
            "mean_step_ms": found.hosts.mean_ns / _MS,
        }
    if found.fusion is not None:
        said["fusion"] = {
            "groups": [list(group) for group in found.fusion.groups],
            "mean_step_ms": found.fusion.replayed.mean_ns / _MS,
            "before_ms": found.fusion.before.mean_ns / _MS,
            "speedup": found.fusion.speedup,
            "tried": found.fusion.tried,
            "model_error": found.fusion.model.error,
        }
    return said


def show(found: Predictions) -> None:
    """Print a line of each prediction."""
    lines = []
    if found.daydream is not None:
        lines.append(f"Daydream: {format_ns(found.daydream.mean_ns)}, one rank and no waiting")
    if found.hosts is not None:
        hosts = len(found.hosts.by_pid())
        lines.append(f"on {hosts} hosts of one GPU: {format_ns(found.hosts.mean_ns)} a step")
    if found.fusion is not None:
        groups = ["+".join(map(str, group)) for group in found.fusion.groups]
        more = f" and {len(groups) - _MOST} more" if len(groups) > _MOST else ""
        lines.append(
            f"tensors sent as {', '.join(groups[:_MOST])}{more}: "
            f"{format_ns(found.fusion.replayed.mean_ns)} a step, "
            f"{format_ns(found.fusion.before.mean_ns)} as they were, by the cost model"
        )
    for line in lines:
        say(plain_console(), line)
