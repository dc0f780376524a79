"""Runs cases in worker processes for some time, and keeps those that end badly."""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 20.0  # seconds of a core for a case
_STARTS = 600.0  # seconds until a worker is ready: the first one compiles
_ROOT = Path(__file__).parents[2]


class Worker:
    """A process of `fuzz.worker`, and its answers as they come."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it ends with the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])},
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        kind, said = self.answer(_STARTS)
        if kind != "ready":
            raise RuntimeError(f"a worker does not start: {kind}: {said}")

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.answers.put(line)
        self.answers.put("")

    def run(self, name: str, number: int) -> tuple[str, str]:
        """What became of a case."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {number}\n")
        self.process.stdin.flush()
        return self.answer(LONGEST)

    def answer(self, seconds: float) -> tuple[str, str]:
        begun, line = self._worked(), None
        while line is None:
            try:
                line = self.answers.get(timeout=1)
            except queue.Empty:
                seconds -= 0.05  # who waits without working hangs, too
                if self._worked() - begun > seconds:
                    self._end()
                    return "hang", self._said()
        if not line:
            return f"crash ({self.process.wait()})", self._said()
        found = json.loads(line)
        return found["kind"], found.get("said", "")

    def _worked(self) -> float:
        """Seconds of a core: other programs may need it as well."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _end(self) -> None:
        """Let it say where it is, and kill it."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        self.stop()

    def _said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-4000:]

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Hunt:
    """The cases of all workers: what comes next, what came of them."""

    names: list[str]
    number: int
    seconds: float
    folder: Path
    end: float = 0.0  # counted from the first worker that is ready
    seen: Counter[str] = field(default_factory=Counter)
    places: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: int = 0

    def next(self) -> tuple[str, int]:
        """The next case: the seeds take turns."""
        with self.lock:
            at, self.turn = self.turn, self.turn + 1
        return self.names[at % len(self.names)], self.number + at // len(self.names)

    def work(self) -> None:
        """Run cases until the time is over."""
        worker = Worker()
        self.end = self.end or time.monotonic() + self.seconds
        while time.monotonic() < self.end:
            worker = worker if worker.lives else Worker()
            name, number = self.next()
            kind, said = worker.run(name, number)
            with self.lock:
                self.seen[kind] += 1
                if kind not in ("read", "refused"):
                    self._keep(name, number, kind, said)
        worker.stop()

    def _keep(self, name: str, number: int, kind: str, said: str) -> None:
        """Show a case, once for each place in the code, and write its files."""
        place = f"{name} {kind} " + "\n".join(said.strip().splitlines()[-3:])
        if place in self.places:
            return
        self.places.add(place)
        from fuzz.worker import Cases

        target = self.folder / f"{name.replace('.', '-')}-{number}"
        if not target.exists():
            target.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as seeds:
                Cases(Path(seeds)).place(name, number, target)
        (target / "said.txt").write_text(f"{kind}\n{said}\n")
        print(
            f"\n{kind}: {target}: PYTHONPATH=tests python -m fuzz --case {name} {number}\n"
            f"{said}",
            flush=True,
        )


def main() -> None:
    """Hunt, or run one case."""
    words = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m fuzz", description=__doc__)
    words.add_argument("--seconds", type=float, default=60)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    words.add_argument(
        "--first", type=int, help="number of the first case; by default the time"
    )
    words.add_argument("--folder", type=Path, default=_ROOT / "fuzz-found")
    words.add_argument("--seed", nargs="*", help="only these")
    words.add_argument("--case", nargs=2, metavar=("NAME", "NUMBER"))
    said = words.parse_args()
    from fuzz.seeds import SEEDS

    if said.case:
        _one(*said.case)
        return
    first = said.first or int(time.time())
    hunt = Hunt(said.seed or [*SEEDS], first, said.seconds, said.folder)
    threads = [threading.Thread(target=hunt.work) for _ in range(said.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not hunt.seen:
        sys.exit("no case was run")
    words_ = ", ".join(f"{count} {kind}" for kind, count in sorted(hunt.seen.items()))
    print(f"{sum(hunt.seen.values())} cases from number {first} on: {words_}")
    sys.exit(1 if hunt.places else 0)


def _one(name: str, number: str) -> None:
    from fuzz.worker import Cases, outcome

    with tempfile.TemporaryDirectory() as folder:
        path = Cases(Path(folder) / "seeds").place(name, int(number), Path(folder))
        kind, said = outcome(name, path)
    print(f"{kind}\n{said}")
    sys.exit(0 if kind in ("read", "refused") else 1)


if __name__ == "__main__":
    main()
