"""What lies beside dumps: stacks of Python, logs of ranks and of the launcher.

None of it is needed. A rank is in the name of a file, in a head of the debug server, or in a
line of the launcher.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fastcomm.formats.flight_recorder import rank_of

_LARGEST = 4 << 20  # bytes of a file that are read
_THREAD = re.compile(r"(?:Current thread|Thread) (?:0x)?[0-9a-f]+ ?\(")
_FRAME = re.compile(r'\s+File "(?P<file>[^"\n]{1,400})", line (?P<line>\d+) in (?P<name>\S+)')
_SPY_FRAME = re.compile(r"\s+(?P<name>\S+) \((?P<file>[^()\n]{1,400}):(?P<line>\d+)\)")
_SERVER = re.compile(r"=== Rank (\d+):")
_KILLED = re.compile(
    r"rank (\d+)\b[^\n]{0,80}?(?:killed by signal (\d+)|exit(?:ed with)?(?: code)? (-?\d+))",
    re.I,
)
_ABORTED = re.compile(r"signal 6$|-6$")
_ABORT = re.compile(r"EnforceNotMet|op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_LIBRARIES = re.compile(
    r"torch/|threading\.py|multiprocessing/|lib/python|site-packages|importlib|concurrent/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonStack:
    """The stack of a rank's training thread, the innermost frame first."""

    frames: tuple[tuple[str, str, int], ...]  # name, file, line

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the frames."""
        return tuple(name for name, _, _ in self.frames)

    @property
    def place(self) -> str:
        """The innermost frame of the job's own files, as text."""
        own = [frame for frame in self.frames if not _LIBRARIES.search(frame[1])]
        name, file, line = (own or [*self.frames])[0]
        return f"{name} ({Path(file).name}:{line})"

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


_GROUPS = frozenset(
    {"new_group", "_new_group_with_tag", "_new_process_group_helper", "split_group"}
)
_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "broadcast"),
        *("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "barrier", "reduce"),
        *("gather", "scatter", "wait", "all_gather_object", "broadcast_object_list"),
    }
)


@dataclass(frozen=True, kw_only=True)
class FileEvidence:
    """What files beside the dumps say of ranks."""

    stacks: dict[int, PythonStack] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)  # how, as the launcher says
    aborted: dict[int, tuple[int, int]] = field(default_factory=dict)  # bytes: came, expected
    errors: dict[int, str] = field(default_factory=dict)  # last line of a rank's log
    ranks: frozenset[int] = frozenset()  # that any file names

    def is_aborted(self, rank: int) -> bool:
        """Return whether a rank aborted itself, by its log or by its signal."""
        return rank in self.aborted or bool(_ABORTED.search(self.dead.get(rank, "")))


def gather(paths: Iterable[Path]) -> FileEvidence:
    """Return what files say that are no dumps; what is none of the known forms is left out."""
    stacks: dict[int, PythonStack] = {}
    dead: dict[int, str] = {}
    aborted: dict[int, tuple[int, int]] = {}
    errors: dict[int, str] = {}
    named: set[int] = set()
    for path in sorted(paths):
        text = _text(path)
        for match in _KILLED.finditer(text):
            if match[2] or match[3] != "0":
                dead[int(match[1])] = match[0]
        rank = rank_of(path.with_suffix("")) if path.suffix in (".log", ".txt") else None
        if _SERVER.search(text):
            parts = _SERVER.split(text)[1:]
            for number, part in zip(parts[::2], parts[1::2], strict=True):
                _add_stack(stacks, int(number), part)
        elif rank is not None and (_THREAD.search(text) or "Python v" in text[:400]):
            named.add(rank)
            _add_stack(stacks, rank, text)
        elif rank is not None and path.suffix == ".log":
            named.add(rank)
            lines = [line for line in text.splitlines() if line.strip()]
            errors.update({rank: lines[-1].strip()} if lines else {})
            if abort := _ABORT.search(text):
                aborted[rank] = (int(abort[1] or 0), int(abort[2] or 0))
    return FileEvidence(
        stacks=stacks,
        dead=dead,
        aborted=aborted,
        errors=errors,
        ranks=frozenset(named | dead.keys()),
    )


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_LARGEST).decode("utf-8", "replace")


def _add_stack(stacks: dict[int, PythonStack], rank: int, text: str) -> None:
    """Keep the stack of the thread that reaches furthest into the job's own files."""
    best: tuple[tuple[str, str, int], ...] = ()
    for part in re.split(r"\n(?=Current thread|Thread )", text):
        pattern = _FRAME if 'File "' in part else _SPY_FRAME
        frames = tuple(
            (match["name"], match["file"], int(match["line"]))
            for match in pattern.finditer(part)
        )
        if frames and frames[-1][0] == "<module>" and len(frames) > len(best):
            best = frames
    if best and (rank not in stacks or len(best) >= len(stacks[rank].frames)):
        stacks[rank] = PythonStack(frames=best)
