"""Test the layers of the package, and that commands load only what they need."""

import subprocess
import sys

import pytest
from builders.places import ROOT

from fastcomm.cli import COMMANDS

HEAVY = {"numba", "llvmlite", "numpy", "pyarrow"}


def python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code):
    """The heavy modules that are there once the code has run."""
    said = python(f"import sys\n{code}\nprint('loaded:', *{HEAVY!r} & set(sys.modules))")
    return said.rpartition("loaded:")[2].split()


def test_imports_point_down():
    pytest.importorskip("importlinter")
    assert "0 broken" in python("from importlinter.cli import lint_imports; lint_imports()")


def test_the_command_line_and_the_package_import_nothing_heavy():
    assert loaded("import fastcomm, fastcomm.cli") == []


def test_help_imports_nothing_heavy():
    code = f"""
from fastcomm.cli import main
for command in {["", *COMMANDS]}:
    main([*command.split(), "--help"], standalone_mode=False)
    assert not {HEAVY} & set(sys.modules), command
"""
    assert loaded(code) == []


def test_lazily_imported_names_exist():
    names = python("import fastcomm; print(*(getattr(fastcomm, n) for n in fastcomm.__all__))")
    assert "open" in names
    assert "search_strategies" in names
