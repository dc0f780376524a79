"""Test dependencies between modules."""

import ast
import re
from pathlib import Path

import fastcomm
import fastcomm_kernels
from fastcomm.metrics.view import COMM
from fastcomm_kernels import intervals

ROOT = Path(fastcomm.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def imports(name, path):
    """The modules of fastcomm that a module imports at its top level, for types too."""
    for node in top_level(ast.parse(path.read_text("utf-8")).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [member for member in members if member in MODULES]
            yield from submodules
            if len(submodules) < len(members):
                yield node.module


def top_level(body):
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from top_level(node.body)


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
    graph = {name: set(imports(name, path)) - {name} for name, path in MODULES.items()}
    # The package names its public functions for type checkers alone.
    graph["fastcomm"] = set()
    assert cycle(graph) is None
    assert cycle({**graph, "fastcomm.errors": {"fastcomm.trace.trace"}}) is not None


def kinds(tree):
    """The classes and aliases of types of a module, with their nodes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign) and node in tree.body:
            (*_, target) = node.targets
            if isinstance(target, ast.Name) and re.fullmatch("[A-Z][a-z].*", target.id):
                yield target.id, node


def test_no_two_types_have_one_name():
    places = {}
    kernels = Path(fastcomm_kernels.__file__).parent
    for path in [*MODULES.values(), *kernels.rglob("*.py")]:
        for name, node in kinds(ast.parse(path.read_text("utf-8"))):
            places.setdefault(name, []).append(f"{path.name}:{node.lineno}")
    assert {name: place for name, place in places.items() if len(place) > 1} == {}


def test_every_combination_of_compute_copies_and_parallelisms_has_a_mask():
    assert COMM < intervals.MASKS
