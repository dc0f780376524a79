"""Test dependencies between modules."""

import ast
import inspect
import re
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import fastcomm
import fastcomm_kernels
from fastcomm.metrics.rank_arrays import COMM
from fastcomm_kernels import intervals

ROOT = Path(fastcomm.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


SETTINGS = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))
CONTRACTS = {row["name"]: row for row in SETTINGS["tool"]["importlinter"]["contracts"]}
MODELS = (
    r"comparison|compat\.dpro|critical_path|device_work|dispatch|idle|info|isp|metrics|planning"
    "|stragglers|timeline"
)
SHOWING = re.compile(r"\.show\.|page$|\.tables$|\.report\.findings$")
# Functions that pages and tables may call: they describe a result, or explain its terms.
DESCRIPTIONS = {
    "fastcomm.info.info.kinds",
    "fastcomm.stragglers.analysis.headline",
    "fastcomm.dispatch.simulation.in_ns",
    "fastcomm.planning.expected.expected_error",
    "fastcomm.planning.result.strategy_text",
    "fastcomm.planning.result.suspect",
    "fastcomm.isp.layer.two_gpus",
    "fastcomm.isp.explanation.memory_terms",
    "fastcomm.isp.explanation.time_terms",
    "fastcomm.planning.search.bottleneck",
    "fastcomm.metrics.outside_steps.outside_sentence",
    "fastcomm.metrics.outside_steps.outside_warning",
    "fastcomm.metrics.missing_data.reason",
    "fastcomm.idle.totals.explained",
    "fastcomm.idle.totals.largest",
    "fastcomm.idle.totals.sentence",
    "fastcomm.compat.dpro.result.graphml",
}


@cache
def parsed(path):
    """The imports, texts and types of a module; a whole syntax tree is too large to keep."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    kept = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return kept, [text for text in texts if isinstance(text, str)], [*kinds(nodes)]


def imports(path):
    """The modules of fastcomm that a module imports, for types and in functions too."""
    for node in parsed(path)[0]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [member for member in members if member in MODULES]
            yield from submodules
            if len(submodules) < len(members):
                yield node.module


def cycle(graph):
    """The modules of one cycle, in order; None without any."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        path.append(name)
        found = next(filter(None, map(visit, sorted(graph[name]))), None)
        path.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def test_no_imports_form_a_cycle_including_type_imports():
    graph = {name: set(imports(path)) - {name} for name, path in MODULES.items()}
    # The package names its public functions for type checkers alone.
    graph["fastcomm"] = set()
    assert cycle(graph) is None
    assert cycle({**graph, "fastcomm.errors": {"fastcomm.trace.trace"}}) is not None


def floor_of(module):
    """The number of the floor of a module, from the top; the package itself is on none."""
    for number, floor in enumerate(CONTRACTS["floors"]["layers"]):
        if any(f"{module}.".startswith(f"{name}.") for name in re.split(" [|:] ", floor)):
            return number
    return None


def test_a_module_that_is_named_as_text_is_no_higher_than_the_one_that_names_it():
    upward = [
        (name, text)
        for name, path in MODULES.items()
        for text in parsed(path)[1]
        if text in MODULES.keys() - {"fastcomm"} and floor_of(text) < floor_of(name)
    ]
    # Workers have the kernels of all questions ready; the executor imports none of them.
    assert upward == [("fastcomm.executors.executor", "fastcomm.preload")]


def functions(path):
    """The functions of fastcomm that a module imports, or calls in a module it imports."""
    tree, objects = ast.parse(path.read_text("utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and "fastcomm" in node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in MODULES:
                    objects[alias.asname or alias.name] = import_module(name)
                else:
                    yield getattr(import_module(node.module), alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield getattr(objects.get(node.value.id), node.attr, None)


def test_what_shows_results_calls_functions_of_models_only_to_describe_them():
    called = {
        (function.__module__, function.__name__)
        for name, path in MODULES.items()
        if SHOWING.search(name)
        for function in functions(path)
        if inspect.isfunction(function)
    }
    of_models = {
        f"{module}.{name}"
        for module, name in called
        if re.match(rf"fastcomm\.({MODELS})\.", module) and not SHOWING.search(module)
    }
    assert of_models == DESCRIPTIONS


def kinds(nodes):
    """The classes and aliases of types of a module, with their lines."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign) and node in nodes[0].body:
            (*_, target) = node.targets
            if isinstance(target, ast.Name) and re.fullmatch("[A-Z][a-z].*", target.id):
                yield target.id, node.lineno


def test_no_two_types_have_one_name():
    places = {}
    kernels = Path(fastcomm_kernels.__file__).parent
    for path in [*MODULES.values(), *kernels.rglob("*.py")]:
        for name, line in parsed(path)[2]:
            places.setdefault(name, []).append(f"{path.name}:{line}")
    assert {name: place for name, place in places.items() if len(place) > 1} == {}


def test_every_combination_of_compute_copies_and_parallelisms_has_a_mask():
    assert COMM < intervals.MASKS
