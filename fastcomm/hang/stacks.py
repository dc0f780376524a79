"""Stacks of Python in which ranks stand, of faulthandler, py-spy or the debug server."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastcomm.hang.texts import FileText

_THREAD = re.compile(r"(?:Current thread|Thread) (?:0x)?[0-9a-f]+ ?(?:\[[^\]\n]{0,80}\] ?)?\(")
_CUT = re.compile(r"^  \.\.\.$", re.M)  # of faulthandler, behind 100 frames
_FRAME = re.compile(
    r'\s+File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9}) in (?P<name>\S+)'
)
_SPY_FRAME = re.compile(r"\s+(?P<name>\S+) \((?P<file>[^()\n]{1,400}):(?P<line>\d{1,9})\)")
_SERVER = re.compile(r"=== Rank (\d{1,7}):")
_STAMP = re.compile(r"(?<!\d)\d{8}_\d{6}(?!\d)")  # in names of files of the debug server
_ONE_MOMENT_S = 10
_LIBRARIES = re.compile(
    r"torch/|threading\.py|multiprocessing/|lib/python|site-packages|importlib|concurrent/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonStack:
    """The stack of a rank's training thread, the innermost frame first."""

    frames: tuple[tuple[str, str, int], ...]  # name, file, line
    path: Path = Path()
    written: int | None = None  # second of the file, of a copy a later one

    @property
    def moment(self) -> tuple[str, int]:
        """What orders stacks of a rank: the time in the name of the file, then its own."""
        stamp = _STAMP.search(self.path.name)
        return ("" if stamp is None else stamp[0]), self.written or 0

    def follows(self, other: "PythonStack") -> bool:
        """Return whether it takes the place of another one: it is newer, or longer."""
        (stamp, written), (old_stamp, old_written) = self.moment, other.moment
        if stamp and old_stamp and stamp != old_stamp:
            return stamp > old_stamp
        if abs(written - old_written) > _ONE_MOMENT_S:
            return written > old_written
        return len(self.frames) >= len(other.frames)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the frames."""
        return tuple(name for name, _, _ in self.frames)

    @property
    def place(self) -> str:
        """The innermost frame of the job's own files, as text."""
        own = [frame for frame in self.frames if not _is_of_library(frame)]
        name, file, line = (own or [*self.frames])[0]
        return f"{name} ({Path(file).name}:{line})"

    @property
    def is_in_collective(self) -> bool:
        """Whether the innermost frame is a collective of PyTorch."""
        name, file, _ = self.frames[0]
        return name in _COLLECTIVES and "torch/" in file

    @property
    def is_in_monitored_barrier(self) -> bool:
        """Whether the rank is in a barrier that no recorder has an entry of."""
        return any(
            name == "monitored_barrier" and "torch/" in file for name, file, _ in self.frames
        )

    @property
    def activity(self) -> str:
        """What the rank is in: message, collective, group, loader, or code."""
        for name, file, _ in self.frames:
            if name in _GROUPS:
                return "group"
            if name in _MESSAGES:
                return "message"
            if (name in _COLLECTIVES and "torch" in file) or name == "_engine_run_backward":
                return "collective"
            if name in ("__next__", "__getitem__", "_next_data", "_try_get_data"):
                return "loader"
        return "code"


def _is_of_library(frame: tuple[str, str, int]) -> bool:
    """Return whether a frame is of a library; py-spy names files of Python without folder."""
    name, file, _ = frame
    is_module = "/" not in file and Path(file).stem in sys.stdlib_module_names
    is_loader = Path(file).name == "dataloader.py" and name in _LOADS
    return is_module or is_loader or _LIBRARIES.search(file) is not None


_LOADS = ("__next__", "_next_data", "_get_data", "_try_get_data")
_GROUPS = frozenset(
    {"new_group", "_new_group_with_tag", "_new_process_group_helper", "split_group"}
)
_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "broadcast"),
        *("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "barrier", "reduce"),
        *(
            "gather",
            "scatter",
            "wait",
            "monitored_barrier",
            "all_gather_object",
            "broadcast_object_list",
        ),
    }
)


def stacks_of(file: FileText, rank: int | None) -> Iterator[tuple[int, PythonStack]]:
    """Yield the stacks of a file with their ranks.

    `rank` is that of the file; a file of the debug server has those of all ranks.
    """
    text = file.text
    parts = _SERVER.split(text)
    if len(parts) > 1:
        sections = [(int(at), part) for at, part in zip(parts[1::2], parts[2::2], strict=True)]
    elif rank is not None and is_stack(text):
        sections = [(rank, text)]
    else:
        return
    for number, section in sections:
        frames = _frames(section)
        if frames:
            yield number, PythonStack(frames=frames, path=file.path, written=file.written)


def is_stack(text: str) -> bool:
    """Return whether a text has stacks of threads."""
    return _THREAD.search(text) is not None or "Python v" in text[:400]


def _frames(text: str) -> tuple[tuple[str, str, int], ...]:
    """Return the frames of the main thread, as it was last.

    It ends with the module; where none does, it may be one that was cut.
    """
    best: tuple[tuple[str, str, int], ...] = ()
    cut = best
    for part in re.split(r"\n(?=Current thread|Thread )", text):
        pattern = _FRAME if 'File "' in part else _SPY_FRAME
        frames = tuple(
            (match["name"], match["file"], int(match["line"]))
            for match in pattern.finditer(part)
        )
        if frames and frames[-1][0] == "<module>":
            best = frames
        elif frames and _CUT.search(part):
            cut = frames
    return best or cut
