"""Commands that apply to a run: what to look at next.

A command is suggested only where the run has what the command needs. A path through all ranks
needs process groups that are matched across ranks; each critical path times of compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fastcomm.critical_path.options import PathOptions
from fastcomm.errors import shell_joined
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.result import Metrics
from fastcomm.options import ReadOptions
from fastcomm.trace.run_traces import ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, and what it finds out."""

    line: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """The commands that apply to one run.

    `arguments` are the paths of the run as the user wrote them, and the options that read it.
    """

    metrics: Metrics
    arguments: Sequence[str]

    def next(self, finding: Finding) -> Command | None:
        """Return the command to run after a finding; None where none applies."""
        following = finding.next
        if not self.has_path or following is None:
            return None
        options: list[str] = []
        if following.tag is not None:
            ranks = self._ranks_with(following.tag)
            if not ranks:
                return None
            options = self._rank_option(ranks)
        elif following.of == "first":
            options = ["--rank", str(finding.ranks[0])]
        elif following.of == "all":
            options = self._rank_option(finding.ranks)
        line = self._line(following.command, *options, *following.options)
        return Command(line=line, purpose=following.purpose)

    @property
    def has_path(self) -> bool:
        """Whether a critical path can be found: times and compute of all ranks are known."""
        return not {"times", "compute"} & set(self.metrics.missing) and bool(
            self.metrics.iterations
        )

    def _rank_option(self, ranks: Sequence[int]) -> list[str]:
        """Return --rank with the first of `ranks`; nothing where a path covers all ranks."""
        if self.metrics.joins_ranks or len(self.metrics.ranks) == 1:
            return []  # all ranks, by default
        return ["--rank", str(ranks[0])]

    def _ranks_with(self, tag: str) -> list[int]:
        """Return the ranks that communicate for a parallelism."""
        rows = self.metrics.tables["bandwidth_by_rank"].select(["rank", "tag"]).to_pylist()
        return [row["rank"] for row in rows if row["tag"] == tag]

    def _line(self, name: str, *options: str) -> str:
        """Return the command line of a subcommand with the paths and options of the run."""
        more = ["--keep-going"] if self.metrics.skipped else []
        return shell_joined(["fastcomm", name, *self.arguments, *options, *more])


# Windows of a critical path are always host marks; and `_line` repeats --keep-going where it
# has skipped a rank.
_NOT_REPEATED = {"step_boundary", "keep_going"}


def reading_arguments(options: ReadOptions) -> list[str]:
    """Return the options that open a run again, as command line arguments."""
    names = (field.name for field in fields(options) if field.name not in _NOT_REPEATED)
    return _arguments({name: getattr(options, name) for name in names})


def window_arguments(window: PathOptions) -> list[str]:
    """Return the options that name a window, as command line arguments."""
    names = ("step", "annotation", "instance", "exact", "data_load_events")
    return _arguments({name: getattr(window, name) for name in names})


def _arguments(values: Mapping[str, object]) -> list[str]:
    """Return options as arguments: a flag for True, nothing for None and False."""
    line = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if name == "data_load_events" and isinstance(value, tuple):
            line += [part for regex in value for part in (option, regex)]
        elif value is True:
            line.append(option)
        elif value is not None and value is not False:
            line += [option, _text(name, value)]
    return line


def _text(name: str, value: object) -> str:
    """Return the value of an option as a user writes it: "1:3" (instance), "0-7" (ranks)."""
    if not isinstance(value, tuple):
        return str(value)
    if name == "instance":
        return ":".join(map(str, value))
    return ranges(sorted(set(value))).replace(" ", "")
