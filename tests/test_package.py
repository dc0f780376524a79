"""Test the wheel, its metadata, the public names and import times."""

import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from builders.commands import invoke
from builders.places import JOBS, ROOT

import fastcomm
from fastcomm import version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ISP = ["isp", "--model", "7B", "--world-size", "64", "--seq-len", "4Ki"]
ISP += ["--global-batch", "4Mi"]
RECORDED = str(JOBS / "ddp-straggler/clean/rank0.json.gz")
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout: the names of its files, and its metadata."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder))
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (place,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, Parser().parsestr(archive.read(place).decode())


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel):
    packages = {"fastcomm": ROOT, "fastcomm_kernels": ROOT / "kernels"}
    ours = {
        path.relative_to(home).as_posix()
        for name, home in packages.items()
        for path in (home / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel[0] if ".dist-info/" not in name} == ours


def test_the_wheel_has_the_data_files(wheel):
    suffixes = {Path(name).suffix for name in wheel[0]}
    assert {".typed", ".toml", ".j2", ".css", ".js"} <= suffixes
    clusters = {path.name for path in (ROOT / "fastcomm/hardware/data").glob("*.toml")}
    assert clusters
    assert clusters == {
        Path(name).name for name in wheel[0] if name.startswith("fastcomm/hardware/data/")
    } - {"__init__.py"}
    assert {"fastcomm/py.typed", "fastcomm_kernels/py.typed"} <= set(wheel[0])


def test_the_metadata_says_what_pip_needs(wheel):
    said = wheel[1]
    assert said["Version"] == version.__version__ == fastcomm.__version__
    assert said["Requires-Python"] == ">=3.11"
    assert set(said.get_all("Provides-Extra")) == {
        *("all", "chakra", "dask", "graph", "mcp", "remote", "sql", "xlsx")
    }
    assert said["License-Expression"] == "Apache-2.0"
    needed = {re.match(r"[\w-]+", each)[0] for each in said.get_all("Requires-Dist")}
    assert {"numba", "numpy", "pyarrow", "scipy", "click"} <= needed


def test_the_extra_all_contains_every_other_extra():
    extras = dict(PROJECT["optional-dependencies"])
    (words,) = extras.pop("all")
    assert words == f"fastcomm[{','.join(sorted(extras))}]"


def test_the_version_is_defined_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    number = re.escape(version.__version__)
    assert re.search(rf"^version: {number}$", text("CITATION.cff"), re.MULTILINE)
    holds = [
        path.relative_to(ROOT).as_posix()
        for home in ("fastcomm", "kernels/fastcomm_kernels")
        for path in (ROOT / home).rglob("*.py")
        if "__version__ =" in path.read_text("utf-8")
    ]
    assert holds == ["fastcomm/version.py"]


def test_the_declared_python_versions_are_tested():
    promised = [
        each.rpartition(" ")[2]
        for each in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", each)
    ]
    assert promised == PYTHONS
    for name in ("ci", "package"):
        tried = re.search(r"python: \[(.*)\]", text(f".github/workflows/{name}.yml"))[1]
        assert re.findall(r"[\d.]+", tried) == PYTHONS


def text(name):
    return (ROOT / name).read_text("utf-8")


def test_every_public_name_is_there_and_documented():
    page = text("docs/python.md")
    for name in fastcomm.__all__:
        found = getattr(fastcomm, name)
        assert name == "__version__" or found.__doc__
        assert f"`fastcomm.{name}" in page, name
    assert set(fastcomm.__all__) <= set(dir(fastcomm))
    assert set(re.findall(r"fastcomm\.([A-Za-z_]+)\(", page)) - set(fastcomm.__all__) == set()


@pytest.mark.parametrize("name", fastcomm.__all__)
def test_every_public_function_is_typed(name):
    found = getattr(fastcomm, name)
    if not inspect.isfunction(found):
        return
    shown = inspect.signature(found)
    assert shown.return_annotation is not shown.empty
    assert all(each.annotation is not each.empty for each in shown.parameters.values())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fastcomm.nothing  # noqa: B018 - the access is the test


def processor_seconds(code):
    """What a fresh interpreter takes for `code`, of a processor; the least of three."""
    program = (
        f"import time; begin = time.process_time()\n{code}\nprint(time.process_time() - begin)"
    )
    return min(
        float(
            subprocess.run(
                [sys.executable, "-c", program],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()[-1]
        )
        for _ in range(3)
    )


def test_the_package_is_imported_quickly():
    # Measured against a module that everyone has; ours alone takes a few milliseconds.
    yardstick = processor_seconds("import email.message, json, logging, tempfile, decimal")
    assert processor_seconds("import fastcomm") < yardstick


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--help"], {"numpy", "numba", "pyarrow", "rich", "fastcomm.options"}),
        (
            ISP,
            {
                "numba",
                "fastcomm_kernels._jit",
                "fastcomm.formats.sources",
                "fastcomm.metrics.result",
            },
        ),
        (
            ["metrics", RECORDED],
            {"pandas", "scipy.linalg", "numba.np.arrayobj", "fastcomm.device_work.analysis"},
        ),
    ],
)
def test_a_command_loads_only_what_it_needs(words, unneeded):
    code = f"""
import sys
sys.argv = ["fastcomm", *{words}]
from fastcomm.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(*sys.modules, file=sys.stderr)
"""
    invoke(*words)  # compiles kernels
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not unneeded & set(done.stderr.split())
