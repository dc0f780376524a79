"""Check `fastcomm.torch` and `fastcomm watch` on real jobs: ``check.py FOLDER [CASE ...]``.

Needs PyTorch and fastcomm in one environment; `make trainer` makes it. Each job runs as four
processes on this machine, with gloo. A case that fails ends the program.
"""

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from fastcomm.trace.run_traces import named_ranks
from fastcomm.watch.windows import windows_below

RANKS, SUSPECT, FULL, DEAD = 4, 2, 1, 3
STEPS = [8, 28, 48]  # at which windows end
_WORKER = Path(__file__).with_name("worker.py")
_TIMEOUT_S = 600


def start(directory, fault):
    """Start the processes of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    return [
        subprocess.Popen(
            [sys.executable, str(_WORKER), str(directory), fault],
            env={**os.environ, **job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def end(processes):
    """Wait for the processes of a job; return their exit codes, outputs and messages."""
    results = [process.communicate(timeout=_TIMEOUT_S) for process in processes]
    return [process.returncode for process in processes], *zip(*results, strict=True)


def warnings(text):
    """The messages of fastcomm among those of a process."""
    return [line for line in text.splitlines() if line.startswith("fastcomm:")]


def by_step(directory):
    """The windows of the only run of a directory, by step."""
    windows = sorted(windows_below(directory), key=lambda window: window.step)
    assert len({window.run_name for window in windows}) == 1, windows
    return {window.step: window for window in windows}


def names(window):
    """The names of a window's visible files."""
    return sorted(path.name for path in window.folder.iterdir() if path.is_file())


def command(*arguments):
    """The exit code and output of a command of fastcomm."""
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def straggler(directory):
    """Rank 0 prints each window, with its straggler; all commands read what is written."""
    codes, outputs, messages = end(start(directory, "straggler"))
    assert codes == [0] * RANKS, messages
    assert [warnings(text) for text in messages] == [[]] * RANKS, messages
    assert outputs[0].count("the page of this window") == len(STEPS)
    assert list(outputs[1:]) == [""] * (RANKS - 1)
    windows = by_step(directory)
    assert [*windows] == STEPS
    for window in windows.values():
        assert [name.partition(".")[0] for name in names(window)] == [
            *(f"rank{rank}" for rank in range(RANKS)),
            "report",
        ]
        assert command("metrics", window.folder)[0] == 0
    assert f"Rank {SUSPECT} is a straggler" in outputs[0]
    code, printed = command(
        "watch", directory, "--once", "--prometheus", directory / "job.prom"
    )
    assert (code, printed.count(" a step")) == (0, len(STEPS)), printed
    assert 'fastcomm_rank_step_seconds{rank="3"}' in (directory / "job.prom").read_text()
    assert not [*directory.rglob(".fastcomm-*")]


def loader(directory):
    """Forked data loaders neither write nor wait."""
    codes, _, messages = end(start(directory, "loader"))
    assert codes == [0] * RANKS, messages
    assert [warnings(text) for text in messages] == [[]] * RANKS, messages
    windows = by_step(directory)
    assert [*windows] == STEPS
    assert all(window.is_whole(RANKS) for window in windows.values())


def dies(directory):
    """Ranks that end otherwise than their peers leave whole files; the others are measured."""
    codes, _, messages = end(start(directory, "dies"))
    assert codes[DEAD] == -9
    assert all(codes), codes  # gloo says that a peer is gone
    windows = by_step(directory)
    assert windows[8].metrics().ranks == tuple(range(RANKS)), messages
    for window in windows.values():
        for name in names(window):
            assert not name.endswith(".json"), name
    code, printed = command("watch", directory, "--once")
    assert code in (0, 3), printed


def full(directory):
    """A rank without disk trains on: one warning, and the windows of the others."""
    codes, outputs, messages = end(start(directory, "full"))
    assert codes == [0] * RANKS, messages
    count = [len(warnings(text)) for text in messages]
    assert count == [int(rank == FULL) for rank in range(RANKS)], messages
    windows = by_step(directory)
    assert [*windows] == STEPS
    others = tuple(rank for rank in range(RANKS) if rank != FULL)
    for window in windows.values():
        assert window.metrics().ranks == others, named_ranks(window.metrics().ranks)
        assert not [name for name in names(window) if name.startswith(f"rank{FULL}.")]
    assert f"{len(others)} of {RANKS} ranks" in outputs[0]
    assert command("watch", directory, "--once")[0] == 3
    assert not [*directory.rglob(".fastcomm-*")]


def two_jobs(directory):
    """Two jobs at once in one directory are two runs."""
    jobs = [start(directory, "none") for _ in range(2)]
    for codes, _, messages in map(end, jobs):
        assert codes == [0] * RANKS, messages
    windows = [*windows_below(directory)]
    assert len({window.run_name for window in windows}) == len(jobs)
    assert sorted(window.step for window in windows) == sorted(STEPS * 2)
    assert all(window.metrics().ranks == tuple(range(RANKS)) for window in windows)


def lightning(directory):
    """The callback for Lightning on its page writes its window."""
    callback(directory, "lightning")


def hugging_face(directory):
    """The callback for Hugging Face on its page writes its window."""
    callback(directory, "transformers")


def torchtitan(directory):
    """What stands in for torchtitan's profiler on its page records a window."""
    callback(directory, "torchtitan")


def callback(directory, package):
    """Train with the code of the docs in the trainer of a package, where it is installed."""
    if find_spec(package) is None:
        print(f"{package} is not installed: pip install {package}")
        return
    directory.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(_WORKER.with_name("callbacks.py")), package],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert warnings(done.stderr) == []
    assert "the page of this window" in done.stdout
    assert [*by_step(directory / "traces")] == [13]


CASES = (straggler, loader, dies, full, two_jobs, lightning, hugging_face, torchtitan)


def main():
    """Run the cases of the command line, or all."""
    folder, *chosen = sys.argv[1:]
    for case in CASES:
        if not chosen or case.__name__ in chosen:
            directory = Path(folder) / case.__name__
            shutil.rmtree(directory, ignore_errors=True)
            case(directory)
            print(f"{case.__name__}: {(case.__doc__ or '').splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
