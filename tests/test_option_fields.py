"""Test that a field of an options class is all that is written about an option."""

import copy
import inspect
import pickle
from dataclasses import dataclass, fields, replace

import pytest

import fastcomm
from fastcomm import options as fastcomm_options
from fastcomm.checks import Range
from fastcomm.compat.dpro import options as replay_options
from fastcomm.critical_path import options as critical_path_options
from fastcomm.device_work import options as device_work_options
from fastcomm.dispatch import options as dispatch_options
from fastcomm.errors import ConfigError
from fastcomm.isp import options as isp_options
from fastcomm.metrics import options as metrics_options
from fastcomm.option_fields import OUTPUT, CheckedOptions, field_infos, option_field, takes
from fastcomm.planning import options as plan_options
from fastcomm.report import options as report_options
from fastcomm.stragglers import options as stragglers_options
from fastcomm.units import Duration, Rate

CLASSES = [
    kind
    for module in (fastcomm_options, isp_options, plan_options)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, CheckedOptions)
    and kind not in (CheckedOptions, critical_path_options.ExecutionTraceOptions)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing(CheckedOptions):
    """Options of no command."""

    colors: int = option_field("Number of colors.", 8, group=OUTPUT, limits=Range(1, 256))
    palette: str | None = option_field(
        "Names of colors, as --colors allows.", group=OUTPUT, is_regex=True, not_with=("gray",)
    )
    gray: bool = option_field("Draw in gray.", False, group=OUTPUT, not_with=("form png",))
    depth: int | None = option_field("Bits.", group=OUTPUT, needs=("form png", "gray"))
    form: str = option_field("Format.", "svg", group=OUTPUT, may_be_empty=False)
    pause: str | Duration | None = option_field(
        "Time between pictures, as in 5us.", group=OUTPUT, not_with=("--quiet",)
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_is_described(kind):
    assert [*field_infos(kind)] == [field.name for field in fields(kind)]
    for info in field_infos(kind).values():
        assert info.text.endswith((".", ")."))


@pytest.mark.parametrize("kind", CLASSES)
def test_partners_are_fields(kind):
    names = {field.name for field in fields(kind)}
    for info in field_infos(kind).values():
        for text in (*info.needs, *info.not_with):
            assert text.startswith("--") or text.partition(" ")[0] in names


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colors": 0}, "^invalid colors 0: expected a number from 1 to 256$"),
        ({"palette": "("}, "^palette: invalid regular expression"),
        ({"palette": "r", "gray": True}, "^palette has no effect with gray; leave one out$"),
        ({"gray": True, "form": "png"}, "^gray has no effect with form png; leave one out$"),
        ({"depth": 8}, "^depth needs form png or gray$"),
        ({"form": ""}, "^missing value of form$"),
        ({"pause": "5"}, "^invalid pause '5': expected a number and a unit"),
        ({"pause": 5}, "^invalid pause 5: expected a number and a unit"),
    ],
)
def test_values_are_checked_by_their_fields(values, message):
    with pytest.raises(ConfigError, match=message):
        Drawing(**values)


def test_partners_that_are_set_are_no_errors():
    assert Drawing(depth=8, form="png").depth == 8
    assert Drawing(depth=8, gray=True, pause="5us").pause == 5000


def test_the_docstring_of_a_function_lists_the_fields():
    @takes(Drawing)
    def draw(subject, options):
        """Draw.

        Parameters
        ----------
        options
            Fields of `Drawing`, by
            name.

        Returns
        -------
        int

        """

    before, after = inspect.getdoc(draw).split("name.\n")
    assert before.endswith("Fields of `Drawing`, by\n    ")
    assert after.startswith("\n    - `colors`: Number of colors.\n")
    assert "- `palette`: Names of colors, as colors allows.\n" in after
    assert "as in 5us.\n\nReturns\n" in after


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (fastcomm.open, fastcomm_options.ReadOptions),
        (fastcomm.compare, metrics_options.MetricsOptions),
        (fastcomm.Run.metrics, metrics_options.MetricsOptions),
        (fastcomm.Run.report, report_options.ReportOptions),
        (fastcomm.Run.kernels, device_work_options.KernelOptions),
        (fastcomm.Run.critical_path, critical_path_options.PathOptions),
        (fastcomm.Run.stragglers, stragglers_options.StragglerOptions),
        (fastcomm.find_stragglers, stragglers_options.StragglerOptions),
        (fastcomm.replay_trial, replay_options.TrialReplayOptions),
        (fastcomm.CriticalPath.what_if, critical_path_options.WhatIfOptions),
        (fastcomm.simulate_dispatch, dispatch_options.DispatchOptions),
        (fastcomm.plan, plan_options.PlanOptions),
        (fastcomm.search_strategies, isp_options.SearchOptions),
    ],
)
def test_functions_of_the_api_list_their_options(function, kind):
    assert all(f"- `{field.name}`: " in function.__doc__ for field in fields(kind))
    lines = function.__doc__.splitlines()
    assert not any("--" in line for line in lines if line.strip(" -"))


@pytest.mark.parametrize(("kind", "text"), [(Rate, "400Gbit/s"), (Duration, "5us")])
def test_a_quantity_is_a_number_that_keeps_its_text(kind, text):
    quantity = kind(text, "option")
    assert quantity == {Rate: 50e9, Duration: 5e3}[kind]
    for same in (quantity, copy.deepcopy(quantity), pickle.loads(pickle.dumps(quantity))):
        assert (type(same), float(same), str(same)) == (kind, quantity, text)


def test_options_with_quantities_are_built_again():
    first = metrics_options.MetricsOptions(link_bandwidth="400Gbit/s")
    again = replace(first, flops=True)
    assert again.link_bandwidth == 50e9
    assert str(again.link_bandwidth) == "400Gbit/s"
