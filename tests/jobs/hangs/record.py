"""Record jobs that hang, and jobs that do not, with what was planted in them.

    python tests/jobs/hangs/record.py FOLDER [--seeds N] [--first-seed N] [--late] [NAME ...]

Needs PyTorch; `make hangs` installs it into an environment of its own. Each job has four to
eight processes on this machine, with gloo; two jobs run at a time. A hang is dumped when no
rank has gone on for some seconds. `FOLDER/NAME/dumps` has what the job left behind, and
`FOLDER/NAME/truth.json` what was planted and which answers are right.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import plans
import programs
import torch
import torch.distributed as dist
import worker
from plans import Plan

_QUIET_S = 6.0  # no rank goes on: a hang
_TIMES_INTERVAL = 12  # ... and for so many times the longest interval before
_BESIDE_S = 14.0  # from the start to a dump beside a checkpoint
_LATE_S = 3.0  # of a rank that is late once: the moment of the first dump
_LONGEST_S = 90.0
_POLL_S = 0.05
_LEAVE_S = 20.0  # in which all dumps are written


class Launcher:
    """Starts the ranks of a job, and has them dump at the right moment."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Start all ranks."""
        self.plan, self.folder = plan, folder
        self.begin = self.moved = time.monotonic()
        self.longest = 0.0  # interval without a tick
        self.total = -1  # of the ticks
        self.exits: dict[int, int] = {}
        size = 8 * (1 + len(worker.State.FIELDS) * plan.world)
        self.state: Any = worker.State(mmap.mmap(-1, size), plan.world)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = {rank: self._start(rank, port) for rank in range(plan.world)}
        self.store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def _start(self, rank: int, port: int) -> int:
        pid = os.fork()
        if pid == 0:
            worker.run(self.plan, rank, port, self.state, self.folder)
            os._exit(0)
        return pid

    def dump(self) -> None:
        """Wait for the moments of the plan, and have all ranks dump at each."""
        for number, is_now in enumerate(getattr(self, f"_{self.plan.moment}")()):
            while not is_now():
                self._look()
                if time.monotonic() - self.begin > _LONGEST_S:
                    raise TimeoutError(f"{self.plan.name}: no moment for a dump")
                time.sleep(_POLL_S)
            self._dump(number + 1)

    def _look(self) -> None:
        """See which ranks have gone on, or have ended."""
        for rank, pid in self.processes.items():
            if rank not in self.exits:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.exits[rank] = os.waitstatus_to_exitcode(status)
        total = sum(self.state.ticks) + sum(self.state.done)
        if total != self.total:
            now = time.monotonic()
            if sum(self.state.step) and not any(self.state.done):
                self.longest = max(self.longest, now - self.moved)
            self.total, self.moved = total, now

    def _dump(self, number: int) -> None:
        self.state.trigger[0] = number
        until = time.monotonic() + _LEAVE_S
        is_frozen = self.plan.how == "stop"
        expected = [rank for rank in self.processes if rank not in self.exits]
        expected = [rank for rank in expected if not (is_frozen and rank in self.plan.culprits)]
        while any(self.state.dumped[rank] < number for rank in expected):
            if time.monotonic() > until:
                raise TimeoutError(f"{self.plan.name}: a rank does not dump")
            time.sleep(_POLL_S)

    def _still(self) -> list[Any]:
        def is_still() -> bool:
            quiet = time.monotonic() - self.moved
            return quiet > max(_QUIET_S, _TIMES_INTERVAL * self.longest) and self.total > 0

        return [is_still]

    def _running(self) -> list[Any]:
        return [lambda: min(self.state.step) >= self.plan.step]

    def _beside(self) -> list[Any]:
        return [
            lambda: (
                min(self.state.step) >= self.plan.step
                and time.monotonic() - self.begin > _BESIDE_S
            )
        ]

    def _finished(self) -> list[Any]:
        return [lambda: all(self.state.done)]

    def _late(self) -> list[Any]:
        step = self.plan.step
        return [
            lambda: min(self.state.step) >= step and time.monotonic() - self.moved > _LATE_S,
            lambda: min(self.state.step) >= step + 3,
        ]

    def end(self) -> None:
        """End all ranks, none of which must see another one end."""
        pids = [pid for rank, pid in self.processes.items() if rank not in self.exits]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        for pid in pids:
            os.waitpid(pid, 0)


def record(plan: Plan, folder: Path) -> None:
    """Run a job, and write its dumps and the truth about it."""
    shutil.rmtree(folder, ignore_errors=True)
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    launcher = Launcher(plan, dumps)
    try:
        launcher.dump()
        calls = [*launcher.state.call]
        done = [*launcher.state.done]
        steps = [*launcher.state.step]
    finally:
        launcher.end()
    if min(steps) < plan.step:
        raise RuntimeError(f"{plan.name}: the ranks came to steps {steps}, not {plan.step}")
    if plan.moment == "still" and plan.fault != "uneven" and all(one == 1 for one in done):
        raise RuntimeError(f"{plan.name}: did not hang")
    groups = _groups(dumps)
    _tidy(plan, dumps, launcher.exits)
    truth = {
        **_judged(plan, launcher.exits, calls).truth(),
        "missing_dumps": sorted({*launcher.exits, *plan.lost, *_frozen(plan)}),
        "exits": launcher.exits,
        "errors": [rank for rank, one in enumerate(done) if one == 2],
        "groups": groups,
        "torch": f"{torch.__version__} gloo",
    }
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


def _frozen(plan: Plan) -> tuple[int, ...]:
    return plan.culprits if plan.how == "stop" else ()


def _judged(plan: Plan, exits: dict[int, int], calls: list[int]) -> Plan:
    """Return the plan with the answers that are right as the job went."""
    aborted = [rank for rank in plan.culprits if exits.get(rank) == -signal.SIGABRT]
    if aborted:  # its dump is gone: only its log tells from one that died by itself
        plan = replace(plan, accept=(*plan.accept, ("missing_rank", plan.culprits)))
    if "root" not in plan.change:
        return plan
    names = [call.name for call in programs.calls(plan.workload, plan.shape, 0, plan.seed)]
    place = names.index(plan.calls[0])
    standing = tuple(rank for rank in plan.members if calls[rank] == place)
    more = tuple((kind, standing) for kind in ("mismatch_root", "stalled"))
    return replace(plan, accept=(*plan.accept, *more))


def _groups(dumps: Path) -> dict[str, dict[str, Any]]:
    """Return the members of all groups by rank, and remove the files that tell them."""
    groups = {}
    for path in sorted(dumps.glob("groups_*.json")):
        groups[path.stem.rpartition("_")[2]] = json.loads(path.read_text())
        path.unlink()
    return groups


def _tidy(plan: Plan, dumps: Path, exits: dict[int, int]) -> None:
    """Shorten logs, remove those that are not wanted, and write that of the launcher."""
    for path in dumps.glob("rank_*.log"):
        if not plan.has_logs or not path.stat().st_size:
            path.unlink()
        else:
            path.write_text(worker.PATHS.sub("", path.read_text()))
    if exits:
        lines = [
            f"launch.py: rank {rank} (local_rank {rank}) was killed by signal {-code}\n"
            for rank, code in exits.items()
        ]
        (dumps / "launcher.log").write_text("".join(lines))


def _in_process(plan: Plan, folder: Path) -> int:
    """Record a job in a process of its own, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)  # its ranks end with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        record(plan, folder)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _load_what_dumps_need() -> None:
    """Import before the fork what PyTorch imports to name the frames of a first dump."""
    frames = torch._C._profiler.gather_traceback(True, False, False)
    torch._C._profiler.symbolize_tracebacks([frames])


def main() -> None:
    """Record the jobs of the command line, or all of some seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="begins of names; by default all jobs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--abreast", type=int, default=2, help="jobs at a time")
    parser.add_argument(
        "--late",
        action="store_true",
        help="let the first dump of a rank load what it needs, and be written seconds late",
    )
    options = parser.parse_intermixed_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    every = [plan for seed in seeds for plan in plans.plans(seed)]
    prefixes = tuple(options.names) or ("",)
    chosen = [plan for plan in every if plan.name.startswith(prefixes)]
    random.Random(0).shuffle(chosen)
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(1)
    if not options.late:
        _load_what_dumps_need()
    failed = _record_all(chosen, options.folder, options.abreast)
    if failed:
        sys.exit(f"not recorded: {', '.join(sorted(failed))}")


def _record_all(chosen: list[Plan], folder: Path, abreast: int) -> list[str]:
    """Record jobs, some at a time; return the names of those that could not be recorded.

    A job that could not be recorded is tried once more.
    """
    running: dict[int, Plan] = {}
    failed: list[str] = []
    try:
        while chosen or running:
            while chosen and len(running) < abreast:
                plan = chosen.pop()
                running[_in_process(plan, folder / plan.name)] = plan
            pid, status = os.wait()
            plan = running.pop(pid)
            if status:
                shutil.rmtree(folder / plan.name)
                chosen += [] if plan.name in failed else [plan]
                failed.append(plan.name)
            print(f"{plan.name}: {plan.planted}{'; not recorded' * bool(status)}", flush=True)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return [name for name in failed if not (folder / name).exists()]


def _end(number: int, _frame: object) -> NoReturn:
    """Exit by an exception, so that the processes of jobs are ended."""
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt that
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
