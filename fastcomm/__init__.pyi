from fastcomm import intervals as intervals
from fastcomm.analyses.critical_path import execution_trace_path as execution_trace_path
from fastcomm.analyses.dispatch import simulate_dispatch as simulate_dispatch
from fastcomm.analyses.replay import replay_trial as replay_trial
from fastcomm.analyses.stragglers import find_stragglers as find_stragglers
from fastcomm.critical_path import CriticalPath as CriticalPath
from fastcomm.dispatch import Recipe as Recipe
from fastcomm.dispatch.workload import Workload as Workload
from fastcomm.dispatch.workload import open_workload as open_workload
from fastcomm.errors import FastcommError as FastcommError
from fastcomm.isp.search import search_strategies as search_strategies
from fastcomm.metrics.result import Metrics as Metrics
from fastcomm.run import Run as Run
from fastcomm.run import compare as compare
from fastcomm.run import open as open  # noqa: A004
from fastcomm.trace.trace import Trace as Trace
from fastcomm.version import __version__ as __version__
