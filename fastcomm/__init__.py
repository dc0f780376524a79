"""Where the time of a distributed training step goes, and why.

run = fastcomm.open_run("traces/")
found = fastcomm.compute_metrics(run, link_bandwidth="400Gbit/s")
found.to_dict()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcomm.errors import FastcommError
from fastcomm.version import __version__

if TYPE_CHECKING:
    from fastcomm.analyses.compare import compare
    from fastcomm.analyses.critical_path import find_critical_path
    from fastcomm.analyses.measure import compute_metrics
    from fastcomm.analyses.replay import replay_run
    from fastcomm.critical_path.analysis import critical_path_analysis
    from fastcomm.critical_path.overlay import overlay_critical_path_analysis
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.critical_path.saved import restore_cpgraph
    from fastcomm.critical_path.what_if import Edit, what_if
    from fastcomm.critical_path.window import Window
    from fastcomm.dispatch.recipe import Recipe
    from fastcomm.dispatch.simulation import simulate as simulate_dispatch
    from fastcomm.dispatch.workload import Workload, open_workload
    from fastcomm.isp.search import find as search_strategies
    from fastcomm.metrics.result import Metrics
    from fastcomm.readers.runs import OpenOptions, open_run
    from fastcomm.replay.session import replay_trial
    from fastcomm.report.html.run_page import write_report
    from fastcomm.trace.run import RunTraces as Run
    from fastcomm.trace.trace import Trace

__all__ = [
    "CriticalPath",
    "Edit",
    "FastcommError",
    "Metrics",
    "OpenOptions",
    "Recipe",
    "Run",
    "Trace",
    "Window",
    "Workload",
    "__version__",
    "compare",
    "compute_metrics",
    "critical_path_analysis",
    "find_critical_path",
    "open_run",
    "open_workload",
    "overlay_critical_path_analysis",
    "replay_run",
    "replay_trial",
    "restore_cpgraph",
    "search_strategies",
    "simulate_dispatch",
    "what_if",
    "write_report",
]

# Loaded on first use: `fastcomm --help` must not wait for numba and pyarrow.
_HOMES = {
    "CriticalPath": "critical_path.result",
    "Edit": "critical_path.what_if",
    "Metrics": "metrics.result",
    "OpenOptions": "readers.runs",
    "Recipe": "dispatch.recipe",
    "Run": "trace.run",
    "Trace": "trace.trace",
    "Window": "critical_path.window",
    "Workload": "dispatch.workload",
    "compare": "analyses.compare",
    "compute_metrics": "analyses.measure",
    "critical_path_analysis": "critical_path.analysis",
    "find_critical_path": "analyses.critical_path",
    "open_run": "readers.runs",
    "open_workload": "dispatch.workload",
    "overlay_critical_path_analysis": "critical_path.overlay",
    "replay_run": "analyses.replay",
    "replay_trial": "replay.session",
    "restore_cpgraph": "critical_path.saved",
    "search_strategies": "isp.search",
    "simulate_dispatch": "dispatch.simulation",
    "what_if": "critical_path.what_if",
    "write_report": "report.html.run_page",
}
# Their module has shorter names for these: it says what they are about.
_AT_HOME = {"Run": "RunTraces", "search_strategies": "find", "simulate_dispatch": "simulate"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fastcomm.{_HOMES[name]}"), _AT_HOME.get(name, name))


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
