"""Where the time of a distributed training step goes, and why.

run = fastcomm.open_run("traces/")
found = fastcomm.compute_metrics(run, link_bandwidth="400Gbit/s")
found.to_dict()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcomm.critical_path.analysis import critical_path_analysis
    from fastcomm.critical_path.overlay import overlay_critical_path_analysis
    from fastcomm.critical_path.saved import restore_cpgraph
    from fastcomm.engine.measure import compute_metrics
    from fastcomm.readers.runs import open_run

__all__ = [
    "__version__",
    "compute_metrics",
    "critical_path_analysis",
    "open_run",
    "overlay_critical_path_analysis",
    "restore_cpgraph",
]

__version__ = "0.1.0"

# Loaded on first use: `fastcomm --help` must not wait for numba and pyarrow.
_HOMES = {
    "open_run": "fastcomm.readers.runs",
    "compute_metrics": "fastcomm.engine.measure",
    "critical_path_analysis": "fastcomm.critical_path.analysis",
    "overlay_critical_path_analysis": "fastcomm.critical_path.overlay",
    "restore_cpgraph": "fastcomm.critical_path.saved",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
