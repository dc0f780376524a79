"""Test that a refused change is told which check refused it, and what it found."""

import os
import subprocess

import pytest
from builders.places import ROOT

MAKE = """#!/bin/sh
[ "$1" = test ] || exit 0
cat <<'END'
{said}
END
exit 2
"""
UNIT = """\
FAILED tests/test_units.py::test_bytes - assert 1000 == 1024
FAILED tests/test_units.py::test_times - assert 1 == 2
=== 2 failed, 5868 passed in 250.71s ===
make[1]: *** [Makefile:66: unit] Error 1
make: *** [Makefile:54: test] Error 2"""
LINT = """\
.venv/bin/ruff check .
{}
Found 3 errors.

make[1]: *** [Makefile:58: lint] Error 1
make[1]: *** Waiting for unfinished jobs....
make: *** [test] Error 2"""


# What a failed test printed comes before the summary, and what else goes on comes behind.
PRINTED = f"""\
ERROR: printed by a test
bench/x.py:3: as printed
=========================== short test summary info ============================
{UNIT}
fastcomm/units.py:300:8: F401"""
IMPORT = """\
test_bytes.py:3: in <module>
E   ModuleNotFoundError: No module named 'bytes'
=========================== short test summary info ============================
ERROR tests/test_bytes.py
make[1]: *** [Makefile:64: modules] Error 2"""
# Two checks at a time.
BOTH = """\
Would reformat: fastcomm/units.py
make[1]: *** [Makefile:58: lint] Error 1
FAILED tests/test_units.py::test_bytes - assert 1000 == 1024
make[1]: *** [Makefile:66: coverage] Error 1"""


FAULTS = (
    "fastcomm/units.py:300:8: F401 [*] `os` imported but unused",
    'fastcomm/units.py:12: error: Incompatible return value type (got "int")  [return-value]',
    "Would reformat: fastcomm/units.py",
    "floors BROKEN (365 ignored imports)",
    "README.md:3: xyzw ==> word",
)


def gate(folder, make):
    """Run the gate with a `make` that is this script."""
    for name in ("make", "chromium"):
        (folder / name).write_text(make)
        (folder / name).chmod(0o755)
    found = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        [ROOT / ".ci" / "run"], check=False, capture_output=True, text=True, env=found
    )


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (UNIT, "unit: FAILED tests/test_units.py::test_bytes - assert 1000 == 1024"),
        (LINT.format("."), "lint: Found 3 errors."),
        *((LINT.format(fault), f"lint: {fault}") for fault in FAULTS),
        ("FAIL Required test coverage of 100% not reached. Total coverage: 99.31%\n"
         "make: *** [coverage] Error 1",
         "coverage: FAIL Required test coverage of 100% not reached. Total coverage: 99.31%"),
        ("kernels/fastcomm_kernels/queues.py   151   2   48   1   98%   97-98\n"
         "FAIL Required test coverage of 100% not reached. Total coverage: 99.96%\n"
         "make: *** [Makefile:76: coverage] Error 1",
         "coverage: kernels/fastcomm_kernels/queues.py   151   2   48   1   98%   97-98"),
        ("kernels/fastcomm_kernels/queues.py   151   0   48   1   99%   97->99\n"
         "FAIL Required test coverage of 100% not reached. Total coverage: 99.98%\n"
         "make: *** [Makefile:76: coverage] Error 1",
         "coverage: kernels/fastcomm_kernels/queues.py   151   0   48   1   99%   97->99"),
        ("sh: 1: no such tool", "test: sh: 1: no such tool"),
        (PRINTED, "unit: FAILED tests/test_units.py::test_bytes - assert 1000 == 1024"),
        (IMPORT, "modules: ERROR tests/test_bytes.py - "
         "ModuleNotFoundError: No module named 'bytes'"),
        (BOTH, "lint: Would reformat: fastcomm/units.py"),
        ("running\nmake[1]: *** [Makefile:68: unit] Killed", "unit: Killed"),
    ],
)  # fmt: skip
def test_the_last_line_of_a_refusal_is_the_check_and_its_first_fault(tmp_path, said, line):
    done = gate(tmp_path, MAKE.format(said=said))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"refused by make {line}"]


def test_a_change_that_passes_is_accepted_without_a_word(tmp_path):
    done = gate(tmp_path, "#!/bin/sh\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
