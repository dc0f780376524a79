"""One process that runs cases and says what became of each, within a limit of memory.

It reads a line "NAME NUMBER" a case, and prints a line of JSON. Who waits too long for that
sends SIGUSR1, upon which it says where it is, and kills it.
"""

import faulthandler
import json
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random

from fastcomm.errors import FastcommError
from fuzz.seeds import SEEDS

ADDRESS_SPACE = 8 << 30  # bytes
MOST_MEMORY = 1 << 30  # bytes that a case may take of it: its file has some ten thousand


class Cases:
    """Seeds as they were made, once, and the cases that follow from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, name: str, number: int, folder: Path) -> Path:
        """The files of a case, in a folder."""
        seed = self.folder / name.replace(".", "-") / name
        if not seed.exists():
            seed.parent.mkdir(parents=True)
            SEEDS[name].make(seed)
        path = folder / name
        if seed.is_dir():
            shutil.copytree(seed, path)
        else:
            shutil.copy(seed, path)
        if number:
            SEEDS[name].change(path, Random(f"{name} {number}"))
        return path


def outcome(name: str, path: Path) -> tuple[str, str]:
    """What became of reading: read, refused, or what is wrong and where."""
    try:
        SEEDS[name].read(path)
    except FastcommError as error:
        return "refused", str(error)[:500]
    except MemoryError:
        return "memory", traceback.format_exc()
    except Exception:
        return "exception", traceback.format_exc()
    return "read", ""


def _peak() -> int:
    """The most memory that this process has had since `_forget`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def _forget() -> int:
    """Begin to measure anew; what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def main() -> None:
    """Answer cases until there are no more."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder) / "seeds")
        for name in SEEDS:  # kernels compile here, and not within the time of a case
            with tempfile.TemporaryDirectory() as place:
                kind, said = outcome(name, cases.place(name, 0, Path(place)))
            if kind != "read":
                sys.exit(f"{name}: the seed itself is {kind}: {said}")
        print(json.dumps({"kind": "ready"}), flush=True)
        for line in sys.stdin:
            name, number = line.split()
            with tempfile.TemporaryDirectory() as place:
                path = cases.place(name, int(number), Path(place))
                before = _forget()
                kind, said = outcome(name, path)
                if kind in ("read", "refused") and _peak() - before > MOST_MEMORY:
                    kind, said = "memory", f"{(_peak() - before) >> 20} MiB"
            print(json.dumps({"kind": kind, "said": said}), flush=True)


if __name__ == "__main__":
    main()
