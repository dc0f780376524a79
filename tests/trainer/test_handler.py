"""Test the handler of finished traces with a profiler that needs no PyTorch."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders.fake_profiler import FakeProfiler
from builders.opened import open_run

import fastcomm
import fastcomm.torch
from fastcomm.errors import ConfigError
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.result import json_text
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.torch import handler, writer
from fastcomm.torch.schedule import _schedule
from fastcomm.watch.windows import ProfiledWindow, windows_below

RANKS = 2


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The files of a job of two ranks, by rank."""
    folder = tmp_path_factory.mktemp("job")
    write(Job.of(ranks=RANKS, steps=3, layers=1), folder)
    return [source.path for source in open_run(folder).sources]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """A job whose ranks are known by the environment, and a process without windows."""
    for name in handler._JOB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    monkeypatch.setattr(handler, "_process", handler._Process())


@pytest.fixture
def processes():
    """The handler starts processes; in all other tests the writer runs in this one."""


@pytest.fixture(autouse=True)
def _writer(request, monkeypatch):
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(handler, "WriterProcess", WriterHere)


class WriterHere:
    """Writes recordings in this process."""

    is_idle = True

    def __init__(self, state):
        self.state = state

    def send(self, recording):
        errors = writer.write_recording(recording)
        self.state.finish(recording, OSError("; ".join(errors)) if errors else None)
        return True

    def close(self):
        pass


def record(traces, directory, monkeypatch, step=13, cut=1.0, ranks=range(RANKS), **options):
    """Hand the traces of ranks to a handler, and wait until they are written."""
    handle = fastcomm.torch.trace_handler(directory, **options)
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        handle(FakeProfiler(traces[rank], step, cut))
        handler._process.windows.clear()  # each rank is a process of its own
    handler._process.end(600)


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_each_rank_has_a_trace_and_a_partial_result_and_rank_0_reports(
    traces, tmp_path, monkeypatch, capfd, processes
):
    record(traces, tmp_path, monkeypatch, ranks=(1, 0), report=True)
    (window,) = windows_below(tmp_path)
    assert (window.folder.name, window.step) == ("step-000013", 13)
    host = handler._host()
    named = {f"rank{rank}.{host}.json.gz" for rank in range(RANKS)}
    assert {path.name for path in window.folder.iterdir()} == {
        ".partials",
        "report.html",
    } | named
    assert files(window.folder / ".partials") == ["rank0.arrow", "rank1.arrow"]
    printed = capfd.readouterr().out
    assert "2 ranks, 3 steps" in printed
    page = str(window.folder / "report.html")
    assert page.replace(" ", "") in "".join(printed.split())
    whole = compute_metrics(open_run(window.folder))
    assert json_text(window.metrics()) == json_text(whole)
    assert json_text(whole) == json_text(compute_metrics(open_run(traces[0].parent)))


@pytest.mark.parametrize(
    ("keep", "kept"), [("partial", []), ("store", ["rank-00000.parquet", "rank-00001.parquet"])]
)
def test_a_trace_may_be_a_partial_result_alone_or_the_file_of_a_store(
    traces, tmp_path, monkeypatch, keep, kept
):
    record(traces, tmp_path, monkeypatch, keep=keep)
    (window,) = windows_below(tmp_path)
    visible = [path.name for path in window.folder.iterdir() if path.is_file()]
    assert sorted(visible) == kept
    expected = compute_metrics(open_run(traces[0].parent))
    assert json_text(window.metrics()) == json_text(expected)
    if kept:
        assert json_text(compute_metrics(open_run(window.folder))) == json_text(expected)


def test_a_step_in_which_the_profiler_was_stopped_does_not_count(
    traces, tmp_path, monkeypatch, capfd
):
    # The traces have steps 10 to 12: stopped after twelve, the mark of step 12 is open.
    record(traces, tmp_path, monkeypatch, step=12, ranks=(1, 0), report=True)
    (window,) = windows_below(tmp_path)
    assert "2 ranks, 2 steps" in capfd.readouterr().out
    whole = compute_metrics(open_run(traces[0].parent), MetricsOptions(steps=(10, 11)))
    assert window.metrics().iteration == whole.iteration


@pytest.mark.parametrize("keep", ["trace", "partial", "store"])
def test_nothing_stays_of_a_window_without_a_whole_step(tmp_path, monkeypatch, capfd, keep):
    folder = tmp_path / "job"
    write(Job.of(ranks=RANKS, steps=1, layers=1), folder)
    one = [source.path for source in open_run(folder).sources]
    record(one, tmp_path / "traces", monkeypatch, step=10, keep=keep, report=True)
    assert files(tmp_path / "traces") == []
    assert not list((tmp_path / "traces").rglob("step-*"))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_rank_that_can_write_nothing_waits_for_nobody(traces, tmp_path, monkeypatch, caplog):
    (tmp_path / "traces").write_text("")
    begun = time.monotonic()
    record(traces, tmp_path / "traces", monkeypatch, ranks=(0,), report=True)
    assert time.monotonic() - begun < 50  # and not the 120 s for other ranks
    assert "a trace is not written" in caplog.text
    assert len(caplog.records) == 1


def test_a_trace_that_is_not_whole_is_removed_and_the_others_count(
    traces, tmp_path, monkeypatch, caplog
):
    with caplog.at_level(logging.WARNING, "fastcomm"):
        record(traces, tmp_path, monkeypatch, ranks=(0,), cut=0.5)
        record(traces, tmp_path, monkeypatch, ranks=(0,), cut=0.5, step=20)
    assert [window.measured for window in windows_below(tmp_path)] == [{}, {}]
    (run,) = tmp_path.iterdir()
    assert files(run) == ["rank0.json", "rank0.json"]  # why there is no partial result
    assert len(caplog.records) == 1  # of the same kind
    assert "not whole; is the disk full?" in caplog.text


def test_ranks_that_failed_are_skipped_ranks_of_the_metrics(traces, tmp_path, monkeypatch):
    record(traces, tmp_path, monkeypatch, ranks=(0,))
    record(traces, tmp_path, monkeypatch, ranks=(1,), cut=0.5)
    (window,) = windows_below(tmp_path)
    metrics = window.metrics()
    assert metrics.ranks == (0,)
    assert [(one.rank, "not whole" in one.error) for one in metrics.skipped] == [(1, True)]


def test_windows_of_a_run_do_not_meet(traces, tmp_path, monkeypatch):
    handle = fastcomm.torch.trace_handler(tmp_path, keep="partial")
    monkeypatch.setenv("RANK", "0")
    for step in (10, 10, 20):
        handle(FakeProfiler(traces[0], step))
    handler._process.end(600)
    names = sorted(window.folder.name for window in windows_below(tmp_path))
    assert names == ["step-000010", "step-000010-2", "step-000020"]


def test_a_run_is_named_by_its_launcher_else_each_process_is_one(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = handler.shared_run_name(2)
    assert first == handler.shared_run_name(2)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert first != handler.shared_run_name(2)
    assert handler.shared_run_name(1) != handler.shared_run_name(1)


class FakeStore:
    """The store of a process group, whose first rank sets a value."""

    def __init__(self):
        self.values = {}

    def compare_set(self, key, expected, value):
        assert expected == ""
        return self.values.setdefault(key, value.encode())


def test_ranks_agree_on_the_name_of_the_run_in_the_store_of_the_process_group(monkeypatch):
    class Group:
        distributed_c10d = type("c10d", (), {})

    store = FakeStore()
    Group.distributed_c10d._get_default_store = lambda: store
    monkeypatch.setattr(handler, "_distributed", lambda: Group)
    names = {handler.shared_run_name(2) for _ in range(3)}
    assert len(names) == 1
    store.values.clear()  # of another job
    assert handler.shared_run_name(2) not in names
    monkeypatch.setattr(store, "compare_set", lambda *_: 1 / 0)  # an old kind of store
    assert handler.shared_run_name(2).startswith("job-")


class Broken:
    """A profiler whose export fails."""

    step_num = 3

    def export_chrome_trace(self, path):
        raise RuntimeError("no profiler")


def test_a_trace_on_another_disk_is_written_from_there_and_its_name_has_the_step(
    traces, tmp_path, monkeypatch
):
    raw, export = [], FakeProfiler.export_chrome_trace
    monkeypatch.setattr(
        FakeProfiler,
        "export_chrome_trace",
        lambda self, path: raw.append(Path(path)) or export(self, path),
    )

    def between_disks(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", between_disks)
    scratch = tmp_path / "scratch"
    record(traces, tmp_path / "traces", monkeypatch, ranks=(1,), scratch=scratch)
    assert raw[0].parent == scratch
    assert raw[0].name.startswith(".fastcomm-")
    assert raw[0].name.endswith(".step-000013.rank1.json")
    (window,) = windows_below(tmp_path / "traces")
    assert [*window.measured] == [1]
    assert files(scratch) == []


def test_an_error_is_one_warning_and_the_training_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    handle = fastcomm.torch.trace_handler(tmp_path / "traces")
    with caplog.at_level(logging.WARNING, "fastcomm"):
        handle(Broken())
        handle(Broken())
        (tmp_path / "file").write_text("")
        fastcomm.torch.trace_handler(tmp_path / "file")(Broken())
        handler._process.end(600)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "RuntimeError: no profiler" in caplog.messages[0]
    assert str(tmp_path / "file") in caplog.messages[1]
    assert len(caplog.records) == 2  # one a window, also where the failure cannot be recorded
    (run,) = (tmp_path / "traces").iterdir()
    windows = [ProfiledWindow.of(folder) for folder in sorted(run.iterdir())]
    assert [window.skipped()[0].rank for window in windows] == [1, 1]
    assert "RuntimeError: no profiler" in windows[0].skipped()[0].error


def test_a_trace_stays_uncompressed_where_no_process_can_be_started(
    traces, tmp_path, monkeypatch, caplog, processes
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with caplog.at_level(logging.WARNING, "fastcomm"):
        record(traces, tmp_path / "t", monkeypatch)
    assert len(caplog.records) == RANKS  # a rank a process
    (run,) = (tmp_path / "t").iterdir()
    assert compute_metrics(open_run(run)).ranks == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "all"}, "keep 'all': expected one of 'trace', 'partial', 'store'"),
        ({"timeout_s": -1}, "timeout_s -1: expected seconds"),
        ({"timeout_s": "1"}, "timeout_s '1': expected seconds"),
        ({"tpp": 2}, "unknown option 'tpp'"),
        ({"bogus": 2}, "Options: ranks, tp, pp, .*, cluster, "),
        ({"cluster": "nope"}, "cluster 'nope': no such file"),
        ({"flops": True, "gpu": "nope"}, "nope"),
        ({"config": "nope.toml"}, r"nope\.toml"),
        ({"order": "nope"}, "nope"),
        ({"tp": 0}, "tp"),
        ({"link_bandwidth": "fast"}, "fast"),
    ],
)
def test_an_invalid_argument_is_an_error_before_the_training(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        fastcomm.torch.trace_handler(tmp_path, **options)


def test_options_reach_the_measurement(traces, tmp_path, monkeypatch, capfd):
    options = {"report": True, "cluster": "dgx-h100", "ranks": (1, 0)}
    record(traces, tmp_path, monkeypatch, **options)
    assert "of limit" in capfd.readouterr().out


# Python 3.12 and newer warn of forks beside threads, and start no thread while a process ends.
PROGRAM = """
import os, sys, threading, time, warnings
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
threading._register_atexit(setattr, threading.Thread, "start", None)
sys.path[:0] = {paths!r}
import fastcomm.torch
from builders.fake_profiler import FakeProfiler
from pathlib import Path
handle = fastcomm.torch.trace_handler({directory!r}, keep="partial")
{body}
"""


def program(traces, tmp_path, body, output=None, **attrs):
    """Run a training script in a process of its own; its output goes into a file, if given.

    Pipes are also those of the process that writes, and closed when it ends.
    """
    text = PROGRAM.format(
        paths=[entry for entry in sys.path if entry], directory=str(tmp_path), body=""
    ) + textwrap.dedent(body).replace("TRACE", repr(str(traces[0])))
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    with output.open("w") if output else nullcontext(subprocess.PIPE) as place:
        return subprocess.run(
            [sys.executable, "-c", text],
            env=environment,
            stdout=place,
            stderr=place,
            text=True,
            timeout=200,
            check=False,
            **attrs,
        )


def test_the_end_of_a_process_waits_for_its_last_window(traces, tmp_path):
    done = program(traces, tmp_path, "handle(FakeProfiler(Path(TRACE), 5))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (window,) = windows_below(tmp_path)
    assert window.metrics().ranks == (0,)


def test_windows_for_which_there_is_no_time_at_the_end_are_written_after_it(traces, tmp_path):
    body = """
    handle = fastcomm.torch.trace_handler({directory!r}, timeout_s=0.5)
    for step in (5, 7, 9):
        handle(FakeProfiler(Path(TRACE), step))
    """.replace("{directory!r}", repr(str(tmp_path)))
    done = program(traces, tmp_path, body)
    assert done.returncode == 0
    assert done.stderr.count("not all windows were written within 1 s") == 1
    check_windows_of_ended_process(tmp_path)


def check_windows_of_ended_process(directory):
    """Check that all windows can be read when a process ends, and are soon written."""
    (run,) = directory.iterdir()  # and no hidden file
    windows = [ProfiledWindow.of(run / f"step-{step:06d}") for step in (5, 7, 9)]
    for window in windows:
        assert window.metrics().ranks == (0,)
    for window in windows:
        assert window.wait(1, 60)
        assert window.metrics().ranks == (0,)
    assert not [*run.rglob("rank0.*.json")]


def test_a_process_that_dies_leaves_all_its_windows_to_the_writer(traces, tmp_path):
    body = """
    for step in (5, 7, 9):
        handle(FakeProfiler(Path(TRACE), step))
    while fastcomm.torch.handler._process.unsent:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
    """
    done = program(traces, tmp_path, body)
    assert done.returncode == -signal.SIGKILL
    check_windows_of_ended_process(tmp_path)


@pytest.mark.parametrize("error", ["ValueError()", "SystemExit(1)"])
def test_a_process_that_fails_waits_for_no_other_rank(traces, tmp_path, error):
    body = f"""
    handle = fastcomm.torch.trace_handler({str(tmp_path)!r}, report=True)

    class Stopped:
        __enter__ = lambda self: None
        __exit__ = lambda *_: handle(FakeProfiler(Path(TRACE), 9))

    os.environ["WORLD_SIZE"] = "2"
    for step in (5, 7) if {error!r} == "ValueError()" else ():
        handle(FakeProfiler(Path(TRACE), step))
    with Stopped():
        raise {error}
    """
    begun = time.monotonic()
    done = program(traces, tmp_path, body, output=tmp_path.with_suffix(".txt"))
    assert time.monotonic() - begun < 60  # and not the 120 s for rank 1
    assert done.returncode == 1
    (run,) = tmp_path.iterdir()
    for folder in run.iterdir():
        assert ProfiledWindow.of(folder).wait(1, 60)


def test_a_job_that_ends_by_a_code_in_the_block_of_its_profiler_waits_for_no_other_rank(
    traces, tmp_path
):
    body = f"""
    from fastcomm.torch.schedule import _profile

    class Kind:  # PyTorch's profiler, outside of a window
        __enter__ = lambda self: None
        __exit__ = lambda self, kind, error, traceback: None

    os.environ["WORLD_SIZE"] = "2"
    handle = fastcomm.torch.trace_handler({str(tmp_path)!r}, report=True)
    with _profile(Kind)():
        handle(FakeProfiler(Path(TRACE), 5))
        sys.exit(3)
    """
    begun = time.monotonic()
    done = program(traces, tmp_path, body, output=tmp_path.with_suffix(".txt"))
    assert time.monotonic() - begun < 60  # and not the 120 s for rank 1
    assert done.returncode == 3
    (run,) = tmp_path.iterdir()
    assert ProfiledWindow.of(run / "step-000005").wait(1, 60)


def test_only_the_export_is_work_of_the_time_after_a_window(
    traces, tmp_path, monkeypatch, processes
):
    monkeypatch.setattr(handler, "_DELAY_S", 600)
    monkeypatch.setattr(handler, "_started", lambda: 1 / 0)
    monkeypatch.setenv("RANK", "1")
    fastcomm.torch.trace_handler(tmp_path)(FakeProfiler(traces[1], 13))
    time.sleep(0.1)
    (path,) = tmp_path.iterdir()  # the directory of a run comes later
    assert compute_metrics(open_run(path)).ranks == (1,)  # if the rank is killed now
    handler._process.is_ending.set()
    handler._process.end(600)
    (run,) = tmp_path.iterdir()
    assert files(run) == [f"rank1.{handler._host()}.json"]


@pytest.mark.parametrize("ending", ["", "1 / 0"])
def test_the_end_of_a_process_waits_for_no_delay(traces, tmp_path, ending):
    body = f"""
    fastcomm.torch.handler._DELAY_S = 600
    handle(FakeProfiler(Path(TRACE), 5))
    {ending}
    """
    program(traces, tmp_path, body, output=tmp_path.with_suffix(".txt"))
    (run,) = tmp_path.iterdir()
    assert ProfiledWindow.of(run / "step-000005").wait(1, 60)


def test_the_ranks_of_a_job_are_those_of_its_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert handler.ranks_of_job() == (1, RANKS)
    group = SimpleNamespace(WORLD=None)  # before it is initialized
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(group=group))
    assert handler.ranks_of_job() == (1, RANKS)
    group.WORLD = SimpleNamespace(rank=lambda: 5, size=lambda: 8)
    assert handler.ranks_of_job() == (5, 8)


def test_a_writer_does_not_wait_for_ranks_when_its_training_has_ended(
    traces, tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, "_PARTING_S", 0.1)
    monkeypatch.setattr(handler._process, "pid", 1 << 30)
    monkeypatch.setattr(handler, "own_process", lambda: handler._process)
    monkeypatch.setenv("RANK", "0")
    begun = time.monotonic()
    fastcomm.torch.trace_handler(tmp_path, report=True)(FakeProfiler(traces[0], 5))
    with handler._process.changed:
        assert handler._process.changed.wait_for(lambda: not handler._process.unsent, 100)
    assert time.monotonic() - begun < 60
    assert [*tmp_path.rglob("report.html")]


def test_a_fork_neither_writes_nor_waits_for_windows_of_its_parent(traces, tmp_path):
    body = """
    handle(FakeProfiler(Path(TRACE), 5))
    child = os.fork()
    if not child:
        sys.exit(0)  # as a data loader ends; it runs what is registered for the end
    assert os.waitpid(child, 0)[1] == 0
    child = os.fork()
    if not child:
        handle(FakeProfiler(Path(TRACE), 7))  # a rank that was forked has windows of its own
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    done = program(traces, tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    steps = sorted(window.step for window in windows_below(tmp_path))
    assert steps == [5, 7]


def test_windows_that_wait_are_written_by_one_process(traces, tmp_path, monkeypatch, processes):
    started, start = [], handler._started
    monkeypatch.setattr(handler, "_started", lambda: started.append(start()) or started[-1])
    handle = fastcomm.torch.trace_handler(tmp_path, keep="partial")
    monkeypatch.setenv("RANK", "0")
    for step, cut in ((5, 1), (7, 0.5), (9, 1)):
        handle(FakeProfiler(traces[0], step, cut))
    handler._process.end(600)
    assert [process.returncode for process in started] == [0]
    windows = {window.step: window for window in windows_below(tmp_path)}
    assert [*windows[7].failed] == [0]  # an error of one is none of the others
    assert windows[5].metrics().ranks == windows[9].metrics().ranks == (0,)


def test_a_writer_that_is_killed_leaves_one_trace_as_it_is_and_another_one_goes_on(
    traces, tmp_path, monkeypatch, caplog, processes
):
    started, start = [], handler._started
    monkeypatch.setattr(handler, "_started", lambda: started.append(start()) or started[-1])
    handle = fastcomm.torch.trace_handler(tmp_path, keep="partial")
    monkeypatch.setenv("RANK", "0")
    with caplog.at_level(logging.WARNING, "fastcomm"):
        handle(FakeProfiler(traces[0], 5))
        while not started:
            time.sleep(0.01)
        handle(FakeProfiler(traces[0], 7))
        started[0].kill()
        handler._process.end(600)
    assert [process.returncode for process in started] == [-signal.SIGKILL, 0]
    assert "its process ended with -9" in caplog.messages[0]
    windows = {window.step: window for window in windows_below(tmp_path)}
    assert [len(windows[step].measured) for step in (5, 7)] == [0, 1]
    assert windows[5].metrics().ranks == windows[7].metrics().ranks == (0,)


def test_a_fork_that_lives_on_does_not_keep_the_writer(traces, tmp_path):
    body = """
    import atexit
    atexit.register(lambda: os.kill(child, 9))  # after the end of the handler
    state = fastcomm.torch.handler
    start, writers = state._started, []
    state._started = lambda: writers.append(start()) or writers[0]
    handle(FakeProfiler(Path(TRACE), 5))
    while not writers:
        time.sleep(0.001)
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        time.sleep(600)
    """
    done = program(traces, tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("has_nice", [True, False])
def test_the_writer_has_a_low_priority_before_python_starts(monkeypatch, has_nice):
    if not has_nice:
        monkeypatch.setattr(handler, "which", lambda _: None)
    own = "import os, sys; print(os.nice(0), sys.argv[1:])"
    words = handler.command(own)
    output = subprocess.check_output(words, text=True, start_new_session=True)
    lowered = min(os.nice(0) + 10, 19)
    if has_nice:
        assert output == f"{lowered} ['nice']\n"
    first, _, _ = handler._WRITER.partition("from fastcomm")
    words = handler.command(f"{first}{own}")
    output = subprocess.check_output(words, text=True, start_new_session=True)
    assert output.split()[0] == str(lowered)


def test_the_writer_has_a_low_priority_before_it_imports_anything():
    first, _, _ = handler._WRITER.partition("from fastcomm")
    code = f"{first}import sys; print(os.nice(0), 'fastcomm' in sys.modules)"
    group = "; print(open('/proc/self/autogroup').read().split()[-1])"
    has_groups = Path("/proc/self/autogroup").exists()
    output = subprocess.run(
        [sys.executable, "-c", code + group * has_groups],
        capture_output=True, text=True, check=True, start_new_session=True,
    ).stdout  # fmt: skip
    low = min(os.nice(0) + 10, 19)  # of what pytest has, up to the lowest there is
    assert output.split() == [f"{low}", "False", *["10"] * has_groups]


def test_the_handler_imports_neither_pytorch_nor_what_measures():
    code = """
import sys, fastcomm.torch
fastcomm.torch.trace_handler("traces")
print({"torch", "numba", "pyarrow", "numpy"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


class Actions:
    """The actions of PyTorch's profiler."""

    NONE, WARMUP, RECORD, RECORD_AND_SAVE = range(4)


def test_windows_begin_after_the_first_steps_and_repeat():
    action = _schedule(10, 3, 5, Actions)
    text = "".join("_wrs"[action(step)] for step in range(30))
    assert text == "____wrrs______wrrs______wrrs__"
    action = _schedule(4, 1, 1, Actions)
    assert "".join("_wrs"[action(step)] for step in range(9)) == "ws__ws__w"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((3, 3, 1), "raise every"), ((0, 1, 1), "every 0"), ((9, 2.5, 1), "steps 2.5")],
)
def test_invalid_numbers_of_steps_are_refused(numbers, message):
    with pytest.raises(ConfigError, match=message):
        _schedule(*numbers, Actions)


def test_without_pytorch_the_profiler_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="needs PyTorch"):
        fastcomm.torch.profiler()


def test_the_record_of_a_failed_rank_may_be_damaged(tmp_path):
    window = ProfiledWindow(folder=tmp_path / "step-000001", step=1)
    window.note_failure(3, "x" * 5000)
    (path,) = window.failed.values()
    assert len(json.loads(path.read_text())["error"]) == 1000
    path.write_text("[")
    (skipped,) = window.skipped()
    assert (skipped.rank, "damaged" in skipped.error) == (3, True)


def test_the_checks_of_real_jobs_read_windows(tmp_path):
    text = Path(__file__).parents[1].joinpath("jobs/trainer/check.py").read_text("utf-8")
    names = {"__name__": "check", "__file__": "tests/jobs/trainer/check.py"}
    exec(compile(text, "check.py", "exec"), names)
    for step in (28, 8):
        window = ProfiledWindow.of(tmp_path / "run" / f"step-{step:06d}")
        window.note_failure(0, "disk full")
    windows = names["by_step"](tmp_path)
    assert [*windows] == [8, 28]
    assert names["names"](windows[8]) == []
