"""Test that modules and settings in the working directory are ignored."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from contextlib import chdir

import pytest
from builders.commands import invoke, words_of
from builders.replay_data import TRIAL

from fastcomm import process
from fastcomm.cli import main
from fastcomm.synthetic.job import Job, TableJob, write_table
from fastcomm.synthetic.traces import write

# The command as pip installs it, once for each line of the input: whichever imports a module of
# the working directory fires its trap.
PROGRAM = """
import sys
from fastcomm.__main__ import main
if __name__ == "__main__":
    for line in sys.stdin.read().splitlines():
        sys.argv[1:] = line.split("\t")
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
        print(flush=True, end="\\0")
"""
OPTIONAL = [
    *("sitecustomize", "usercustomize", "cuda", "bokeh", "pandas", "polars", "matplotlib"),
    *("IPython", "cupy", "torch", "psutil", "tblib", "lz4", "snappy", "blosc", "uvloop", "ucp"),
    *("zstandard", "zstd", "s3fs", "gcsfs", "netCDF4", "h5py", "sparse", "mmh3", "xxhash"),
    *("cityhash", "gilknocker", "jupyter_server", "setproctitle", "dotenv", "colorama"),
]
GROUPS = ["numba_extensions", "dask.sizeof", "dask.array.backends", "fsspec.specs"]
GROUPS += ["distributed.comm.backends", "universal_pathlib.implementations"]
SHAPE = "--num-nodes 1 --gpus-per-node 8 --experts-per-gpu 1 --seq-len 64"

ON_WORKERS = [
    "info . --all --json",
    "metrics . --json --output {out}/metrics",
    "compare . . --json",
    "critical-path . --json",
    "what-if . --scale compute=0.5 --json",
    "ingest . -o {out}/store",
    "convert . {out}/chakra --to chakra",
]
ALONE = [
    *ON_WORKERS,
    "report . --html {out}/page.html",
    "critical-path . --rank 0 --overlay {out}/overlay.json --save {out}/saved",
    "convert . {out}/all.json",
    "dpro stats {out}/all.json --json",
    "stragglers table.csv --meta table.yaml --json",
    "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --json",
    f"dispatch generate {SHAPE} --iter-num 1 -o {{out}}/workload",
    "dispatch compare {out}/workload --json",
    "demo {out}/demo --num-ranks 1",
    "demo {out}/demo-nsys --num-ranks 1 --format nsys",
    "completion bash",
]
REPLAY = [f"dpro replay {TRIAL} --bottleneck --json"] if TRIAL.is_dir() else []
# Relative homes are the working directory.
HOMES = {"HOME": ".", "XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": "."}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A directory of traces, and beside it the command as pip installs it."""
    folder = tmp_path_factory.mktemp("given") / "run"
    write(Job.of(ranks=2, steps=1, layers=1), folder)
    table, meta = write_table(TableJob.of(8, 0.3), folder)
    table.rename(folder / "table.csv")
    meta.rename(folder / "table.yaml")
    program = folder.parent / "bin" / "fastcomm"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    return folder


@pytest.fixture(scope="module")
def results(run):
    """What the commands print in this process, without workers and without traps."""
    out = run.parent / "out"
    with chdir(run):
        texts = [invoke(*words_of(words, out=out)).stdout for words in ALONE]
    return dict(zip(ALONE, (shown(text, run) for text in texts), strict=True))


@pytest.fixture(scope="module")
def trapped(run):
    """The same directory, with a trap for each module name and files of settings."""
    folder = run.parent / "trapped" / "run"
    shutil.copytree(run, folder)
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *OPTIONAL}
    mark = str(folder.parent / "fired")
    code = (
        f"import sys\nwith open({mark!r}, 'a') as file: print(__name__, sys.argv, file=file)\n"
    )
    for name in [*names, "evil", "fastcomm", "fastcomm_kernels"]:
        (folder / f"{name}.py").write_text(code)
    plugins = "".join(f"[{group}]\nevil = evil:evil\n" for group in GROUPS)
    (folder / "evil-1.0.dist-info").mkdir()
    (folder / "evil-1.0.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1.0\n")
    (folder / "evil-1.0.dist-info" / "entry_points.txt").write_text(plugins)
    (folder / ".numba_config.yaml").write_text("chrome_trace: overwritten\n")
    broken = ("dask.yaml", "distributed.yaml", "settings.toml", "matplotlibrc", ".env")
    for name in (*broken, ".config/fastcomm/settings.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("broken: [\n")
    preload = f"{{preload: {folder / 'evil.py'}}}"
    text = f"distributed: {{scheduler: {preload}, nanny: {preload}, worker: {preload}}}\n"
    for name in (".config/dask/a.yaml", ".dask/a.yaml", "dask/a.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def call(folder, *commands, **environment):
    """Run the installed command in a directory, in one process; the output of each line."""
    out = folder.parent / "out"
    program = folder.parent / "bin" / "fastcomm"
    if not program.exists():
        program = folder.parents[1] / "bin" / "fastcomm"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DASK"))}
    done = subprocess.run(
        [sys.executable, program],
        input="\n".join("\t".join(words_of(command, out=out)) for command in commands),
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (commands, done.stderr)
    return [shown(text, folder) for text in done.stdout.split("\0")[:-1]]


def shown(text, folder):
    """An output without the places of its files."""
    return text.replace(str(folder.parent / "out"), "OUT").replace(f"{folder}/", "")


def fired(folder):
    path = folder.parent / "fired"
    return sorted(set(path.read_text().splitlines())) if path.exists() else []


@pytest.mark.parametrize(
    ("commands", "how", "homes"),
    [
        (ALONE, "", {}),
        ([*ON_WORKERS, *REPLAY], " --workers 2", HOMES),
    ],
)
def test_no_module_of_the_directory_is_imported(results, trapped, commands, how, homes):
    found = call(trapped, *(words + how for words in commands), **homes)
    assert fired(trapped) == []
    for words, text in zip(commands, found, strict=True):
        # What doctor says is of this machine, and a replay without traps would take long.
        assert words in ("doctor", *REPLAY) or text == results[words]
    assert not (trapped / "overwritten").exists()
    shutil.rmtree(trapped.parent / "out")


def test_the_working_directory_leaves_the_path_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/other"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/other"]))
    process.drop_working_directory()
    assert sys.path == ["/other"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/other"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process.drop_working_directory()
    assert sys.path == [str(tmp_path), "/other"]


def test_the_environment_of_children_is_restored_after_the_last(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/other", ""]))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    first, second = process.safe_children(), process.safe_children()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["PYTHONPATH"] == "/other"
    assert os.environ["PYTHONSAFEPATH"] == "1"
    second.__exit__(None, None, None)
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["", "/other", ""])
    assert "PYTHONSAFEPATH" not in os.environ


def test_workers_are_refused_if_the_directory_cannot_be_excluded(run):
    done = subprocess.run(
        [sys.executable, "-E", run.parent / "bin" / "fastcomm"],
        input="\t".join(("metrics", ".", "--workers", "2")),
        cwd=run,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "Error: python -E: workers would import modules of the working"
    )


# Numba reads its settings when it is imported, and again for each function that it compiles.
RELOAD = """
import numpy, yaml
from fastcomm_kernels import _jit
_jit._numba_settings.reload_config()
print(_jit.cache_folder())
"""
COMPILE = f"""{RELOAD}
@_jit.kernel
def twice(values):
    return values * 2
assert (twice(numpy.arange(3)) == [0, 2, 4]).all()
"""


@pytest.mark.parametrize(
    ("content", "code"),
    [("chrome_trace: overwritten\n", COMPILE), ("broken: [\n", RELOAD), ("- 1\n", RELOAD)],
)
def test_numba_reads_no_settings_of_the_working_directory(tmp_path, content, code):
    (tmp_path / ".numba_config.yaml").write_text(content)
    program, home = tmp_path / "program.py", tmp_path / "home"
    program.write_text(code)
    environment = {**os.environ, "XDG_CACHE_HOME": "cache", "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(home))
    assert {*tmp_path.iterdir()} == {tmp_path / ".numba_config.yaml", program, home}


def test_settings_are_not_read_from_a_relative_home(tmp_path):
    assert settings_path(tmp_path, XDG_CONFIG_HOME="config", HOME=str(tmp_path / "home"))


def settings_path(folder, **environment):
    """Whether the file of settings lies in the home in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv(main.SETTINGS, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        return main.settings_path().is_relative_to(folder / "home")
