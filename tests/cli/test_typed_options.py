"""Test that the command line and the API have equal option names, defaults and errors."""

import inspect
from dataclasses import fields

import pytest
from fuzz.options import commands

import fastcomm
from fastcomm.compat.dpro.options import TrialReplayOptions
from fastcomm.critical_path.options import PathOptions, WhatIfOptions
from fastcomm.device_work.options import KernelOptions
from fastcomm.dispatch.options import DispatchOptions, WorkloadOptions
from fastcomm.errors import ConfigError
from fastcomm.isp.options import SearchOptions
from fastcomm.metrics.options import MetricsOptions
from fastcomm.options import ReadOptions
from fastcomm.planning.options import PlanOptions
from fastcomm.report.options import ReportOptions
from fastcomm.stragglers.options import StragglerOptions

COMMANDS = commands()
ASKED = {"model": "7B", "world_size": 8, "seq_len": 4096, "global_batch": 1 << 20}


def defaults(command):
    """Each option of a command that is a field of a class: its name and both defaults."""
    params = command.make_context("fastcomm", [], resilient_parsing=True).params
    for kind in getattr(command.callback, "option_classes", {}).values():
        for field in fields(kind):
            if field.name in params:
                yield field.name, params[field.name], field.default


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_and_the_api_have_equal_defaults(name):
    for option, of_command, of_api in defaults(COMMANDS[name]):
        assert of_command == of_api, option


def test_all_commands_that_read_runs_build_options():
    names = ("metrics", "critical-path", "what-if", "stragglers", "plan", "isp")
    for name in (*names, "dispatch compare"):
        assert len(list(defaults(COMMANDS[name]))) > 3, name


@pytest.mark.parametrize(
    ("name", "function", "kind"),
    [
        ("metrics", fastcomm.Run.metrics, MetricsOptions),
        ("report", fastcomm.Run.report, ReportOptions),
        ("compare", fastcomm.compare, MetricsOptions),
        ("kernels", fastcomm.Run.kernels, KernelOptions),
        ("critical-path", fastcomm.Run.critical_path, PathOptions),
        ("stragglers", fastcomm.Run.stragglers, StragglerOptions),
        ("dpro replay", fastcomm.replay_trial, TrialReplayOptions),
        ("what-if", fastcomm.CriticalPath.what_if, WhatIfOptions),
        ("plan", fastcomm.plan, PlanOptions),
        ("isp", fastcomm.search_strategies, SearchOptions),
    ],
)
def test_a_function_takes_the_options_that_its_command_builds(name, function, kind):
    assert kind in COMMANDS[name].callback.option_classes.values()
    shown = inspect.signature(function).parameters
    assert {field.name for field in fields(kind)} <= shown.keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"penality": 0.9}, "unknown option 'penality'; did you mean 'penalty'\\?"),
        (
            {"overlap_weights": "nonsense"},
            "invalid overlap_weights 'nonsense': expected one of layer, per_op",
        ),
        ({"p2p": 7}, "invalid p2p 7: expected one of whole, scatter"),
        ({"flash": "no"}, "invalid flash 'no': expected True or False"),
        ({"memory": ""}, "missing value of memory"),
    ],
)
def test_unknown_options_and_values_of_a_search_are_errors(values, message):
    with pytest.raises(ConfigError, match=message):
        fastcomm.search_strategies(**ASKED, **values)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ReadOptions, {"tp": 0}, "invalid tp 0"),
        (
            ReadOptions,
            {"tp": True},
            "invalid tp True: expected a whole number",
        ),
        (ReadOptions, {"ranks": 0.5}, "invalid ranks 0.5: expected a list"),
        (
            ReadOptions,
            {"ranks": ["a"]},
            "invalid ranks 'a': expected a whole number",
        ),
        (
            ReadOptions,
            {"step_boundary": "gpu"},
            "expected one of auto, device, host",
        ),
        (MetricsOptions, {"link_bandwidth": "fast"}, "bandwidth 'fast'"),
        (MetricsOptions, {"steps": [-1]}, "invalid steps -1"),
        (PathOptions, {"step": 1, "annotation": "x"}, "contradict"),
        (PathOptions, {"rank": -1}, "invalid rank -1"),
        (PathOptions, {"instance": 1}, "instance needs annotation"),
        (PathOptions, {"exact": True}, "exact needs annotation"),
        (
            WorkloadOptions,
            {"law": "zipf", "compat": "seed"},
            "with compat seed",
        ),
        (
            WorkloadOptions,
            {"law": "gate", "zipf_alpha": 0.0},
            "zipf_alpha has no effe",
        ),
        (DispatchOptions, {"demand": "all"}, "expected one of copies, unique"),
        (
            StragglerOptions,
            {"threshold": float("nan")},
            "invalid threshold nan",
        ),
    ],
)
def test_options_check_their_values(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind(**values)


def test_lists_become_tuples():
    assert ReadOptions(ranks=range(3)).ranks == (0, 1, 2)
    assert MetricsOptions(steps=[4, 5]).steps == (4, 5)


def test_functions_that_take_options_show_them():
    shown = inspect.signature(fastcomm.Run.metrics).parameters
    assert [*shown][1:] == [each.name for each in fields(MetricsOptions)]
    assert shown["bytes"].default == "payload"
    assert inspect.signature(fastcomm.search_strategies).parameters["p2p"].default == "whole"
    assert [*inspect.signature(fastcomm.open).parameters][:2] == ["paths", "workers"]
