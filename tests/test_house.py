"""Test the layers of the package, what commands load, and who skips tests without data."""

import re
import subprocess
import sys

import pytest
from builders import shared_data
from builders.places import ROOT, TESTS

from fastcomm.cli.main import COMMANDS

HEAVY = {"numba", "llvmlite", "numpy", "pyarrow"}
# A path of the data, or a skip that depends on a path other than one of the system.
LACKS_DATA = re.compile(
    r"""shared/data|["']shared["'] /"""
    r"""|skipif\((?!not Path\("/proc)[^\n]*\.(exists|is_dir|is_file)\("""
    r"""|\.(exists|is_dir|is_file)\(\):\n +pytest\.skip\("""
)


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
    assert loaded("import fastcomm, fastcomm.cli.main") == []


def test_help_imports_nothing_heavy():
    code = f"""
from fastcomm.cli.main import main
for command in {["", *COMMANDS]}:
    main([*command.split(), "--help"], standalone_mode=False)
    assert not {HEAVY} & set(sys.modules), command
"""
    assert loaded(code) == []


def test_lazily_imported_names_exist():
    names = python("import fastcomm; print(*(getattr(fastcomm, n) for n in fastcomm.__all__))")
    assert "open" in names
    assert "search_strategies" in names


def test_one_module_chooses_between_isal_and_the_standard_library():
    paths = sorted((ROOT / "fastcomm").rglob("*.py"))
    chooses = re.compile(r"^ *(from|import) isal", re.MULTILINE)
    assert [path.name for path in paths if chooses.search(path.read_text("utf-8"))] == [
        "files.py"
    ]


def test_one_module_skips_the_tests_that_lack_data():
    own = {"shared_data.py", "test_house.py"}
    paths = [path for path in TESTS.rglob("*.py") if path.name not in own]
    assert [path.name for path in paths if LACKS_DATA.search(path.read_text("utf-8"))] == []


def test_a_test_that_lacks_data_is_skipped_with_the_folder_as_the_reason():
    mark = shared_data.needs("nothing", "nowhere/file.json")
    (is_absent,), reason = mark.args, mark.kwargs["reason"]
    assert is_absent
    assert reason == (
        "not beside the checkout: shared/data/nothing, shared/data/nowhere/file.json"
    )
    with pytest.raises(pytest.skip.Exception, match=r"shared/data/nothing$"):
        shared_data.shared("nothing")
