"""The directories that a server may read: what lies outside of them is refused.

Paths are resolved first, and a symbolic link inside a run that leads outside is refused, too.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fastcomm.errors import ConfigError
from fastcomm.files import is_url

_MOST_ENTRIES = 200_000  # of a run
_MOST_DEPTH = 5  # of directories that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFolder:
    """A directory with files: its name for the tools, and what lies in it."""

    name: str
    files: int
    size: int  # bytes
    kinds: str  # the most usual ends of names


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The directories of a server, resolved."""

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[str | Path]) -> Self:
        """Resolve directories. Raises `ConfigError` for one that does not exist."""
        roots = []
        for path in paths:
            root = Path(path).resolve()
            if not root.is_dir():
                raise ConfigError(f"{path}: no such directory; name those that hold runs")
            roots.append(root)
        return cls(roots=tuple(dict.fromkeys(roots)))

    def path(self, name: str) -> Path:
        """Return the resolved path of a run; raise `ConfigError` if it is outside or absent.

        `name` is absolute, or begins with the name of a directory of the server, or is relative
        to one of them.
        """
        if not name.strip() or is_url(name) or "\0" in name:
            raise ConfigError(f"{name!r} is no run; list_runs names the runs")
        paths = [*self._candidates(name)]
        inside = [path for path in paths if self._is_inside(path)]
        for path in inside:
            if path.exists():
                return path
        if len(inside) == len(paths):
            raise ConfigError(f"{name}: no such run; list_runs names the runs")
        raise ConfigError(f"{name} is outside of the directories of this server")

    def _candidates(self, name: str) -> Iterator[Path]:
        """Yield the resolved paths that a name may stand for."""
        path = Path(name)
        if path.is_absolute():
            yield path.resolve()
            return
        for root in self.roots:
            if path.parts and path.parts[0] == root.name:
                yield (root.parent / path).resolve()
        for root in self.roots:
            yield (root / path).resolve()

    def _is_inside(self, path: Path) -> bool:
        return any(path == root or root in path.parents for root in self.roots)

    def stamp(self, path: Path) -> tuple[Any, ...]:
        """Return what changes when files of a run change: their number, sizes and times.

        Raises `ConfigError` for a symbolic link that leads outside.
        """
        count = size = latest = 0
        for entry in self._entries(path):
            if entry.is_symlink() and not self._is_inside(entry.resolve()):
                raise ConfigError(
                    f"{self.name(entry)} is a link that leads outside of the directories of "
                    "this server"
                )
            try:
                status = entry.stat()
            except OSError:
                continue  # a link to nothing, or a file that is gone
            count, size = count + 1, size + status.st_size
            latest = max(latest, status.st_mtime_ns)
            if count > _MOST_ENTRIES:
                raise ConfigError(f"{self.name(path)} has too many files for one run")
        return str(path), count, size, latest

    @staticmethod
    def _entries(path: Path) -> Iterator[Path]:
        """Yield a file, or all that is below a directory; links are not followed."""
        yield path
        for folder, names, files in os.walk(path):
            for name in (*names, *files):
                yield Path(folder) / name

    def name(self, path: Path) -> str:
        """Return the name of a path for the tools: it begins with that of its directory."""
        for root in self.roots:
            if path == root or root in path.parents:
                is_unique = [other.name for other in self.roots].count(root.name) == 1
                return str(path.relative_to(root.parent)) if is_unique else str(path)
        return path.name

    def listed(self) -> list[ListedFolder]:
        """Return the directories that have files, sorted by name."""
        rows = []
        for root in self.roots:
            for folder, names, files in os.walk(root):
                if len(Path(folder).relative_to(root).parts) >= _MOST_DEPTH:
                    names.clear()
                names[:] = sorted(name for name in names if not name.startswith("."))
                if present := [Path(folder) / name for name in files if name[0] != "."]:
                    rows.append(self._row(Path(folder), present))
        return sorted(rows, key=lambda row: row.name)

    def _row(self, folder: Path, files: Sequence[Path]) -> ListedFolder:
        ends = ["".join(path.suffixes[-2:])[-24:] or "no suffix" for path in files]
        usual = sorted(set(ends), key=lambda end: (-ends.count(end), end))[:2]
        size = sum(path.lstat().st_size for path in files if path.exists())
        return ListedFolder(
            name=self.name(folder), files=len(files), size=size, kinds=", ".join(usual)
        )
