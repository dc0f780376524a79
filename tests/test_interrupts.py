"""Ctrl-C at any moment of what opens, replaces, locks and removes files stays Ctrl-C."""

import dis
import gc
import signal
import subprocess
import sys

import pytest

from fastcomm import files, process
from fastcomm.formats.kineto.ranks import peek
from fastcomm.formats.store.files import locked

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


# Where CPython 3.11 and later look for signals: before the first, after the second.
_BEFORE = {dis.opmap.get(name) for name in ("RESUME", "JUMP_BACKWARD")}
_AFTER = {dis.opmap.get(name) for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW")} - {None}


class Interrupt:
    """Act as on Ctrl-C at the moment of this number where Python looks for signals."""

    def __init__(self, number):
        self.left = number
        self.last = {}  # instruction of each frame

    def __call__(self, frame, event, _argument):
        frame.f_trace_opcodes = True
        if event == "opcode":
            instruction = frame.f_code.co_code[frame.f_lasti]
            last, self.last[id(frame)] = self.last.get(id(frame)), instruction
            self.left -= instruction in _BEFORE or last in _AFTER
            if self.left == 0:
                self.left = -1
                process.interrupt(signal.SIGINT, frame)
        return self


def interrupted(call, number):
    """Call it with an interrupt; return whether it came, and what the call raised."""
    process._last_signal_s = -process._QUIET_S
    interrupt, raised = Interrupt(number), None
    tracer = sys.gettrace()  # of coverage
    handler = signal.signal(signal.SIGINT, process.interrupt)
    gc.disable()  # it would run destructors of other tests
    sys._getframe().f_trace_opcodes = True  # before any trace, or Python 3.12 traces none
    sys.settrace(interrupt)
    try:
        call()
    except BaseException as error:
        raised = error
    finally:
        sys.settrace(tracer)
        gc.enable()
        signal.signal(signal.SIGINT, handler)
    return interrupt.left < 0, raised


def read(path):
    assert files.text(path / "text") == "text"


def write(path):
    with files.aside(path / "new") as unfinished:
        unfinished.write_text("new")


def lock(path):
    with locked(path) as is_locked:
        assert is_locked


def use_a_temporary_folder(path):
    with process.temporary_folder() as folder:
        (folder / "file").write_text("")


def look_at_a_trace(path):
    head = peek(path / "rank0.json")
    assert head.kind == "profiler", head


@pytest.mark.parametrize("call", [read, write, lock, use_a_temporary_folder, look_at_a_trace])
def test_an_interrupt_at_any_moment_is_no_other_error(call, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("text")
    (tmp_path / "rank0.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(process, "_waits_for_import", lambda *_: False)
    ignored = []  # by Python, in a destructor
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_value))
    call(tmp_path)  # modules are imported
    number = 0
    is_over = False
    while not is_over:
        number += 1
        peek.__globals__["_peek"].cache_clear()
        came, raised = interrupted(lambda: call(tmp_path), number)
        if came:
            errors = [raised, *ignored]
            assert any(isinstance(error, KeyboardInterrupt) for error in errors), number
            assert isinstance(raised, KeyboardInterrupt | None), (number, raised)
        is_over = not came
        ignored.clear()
    assert number > 25
    gc.collect()  # files that an interrupt left open
    process.remove_all()
    assert not files.left_behind(tmp_path)


MODULE = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    pass
print("imported", flush=True)
"""
SCRIPT = """
import time
from fastcomm.process import interruptible

with interruptible():
    begun = time.monotonic()
    try:
        import module
        time.sleep(20)
    except SystemExit as error:
        print(error.code, time.monotonic() - begun)
"""


@pytest.mark.parametrize(("seconds", "before"), [(0.2, ["imported"]), (30, [])])
def test_a_signal_within_an_import_waits_for_its_end_but_not_forever(tmp_path, seconds, before):
    (tmp_path / "module.py").write_text(MODULE.format(seconds=seconds))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    code, took = last.split()
    assert (lines, code) == (before, str(128 + signal.SIGTERM))
    assert seconds <= float(took) < 15 if before else 2 <= float(took) < 15


AT_THE_END = """
import _thread, atexit, signal
from fastcomm.process import handle

def refused(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

@atexit.register
def end():
    _thread.start_new_thread = refused
    try:
        import module
    except SystemExit as error:
        print(error.code)

handle()
"""


def test_a_signal_within_an_import_at_the_end_of_the_process_does_not_wait(tmp_path):
    module = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "module.py").write_text(module)
    (tmp_path / "script.py").write_text(AT_THE_END)
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGTERM}\n", "")
