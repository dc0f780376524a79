"""Command lines of extreme values: every option and argument of every command, one at a time.

The commands themselves say what they take, so that new options are covered. A value is taken or
refused in a few lines, within `LONGEST` seconds of a core.
"""

import atexit
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import click
from builders.commands import words_of
from builders.exchanges import EXCHANGES
from builders.made_trials import mxnet
from builders.places import RECORDED
from builders.profiled_windows import write_window
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch import workload
from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import FastcommError
from fastcomm.synthetic.job import Job, TableJob, write_table
from fastcomm.synthetic.traces import write

LONGEST = 2.0
MOST_LINES = 8  # of an error
_CODES = (0, 1, 2, 3, 4)

NUMBERS = (
    *("nan", "inf", "-inf", "1e308", "-1e308", "1e-320", "-1", "0", "1e12", "99999999999"),
    *("18446744073709551616", "", "9" * 5000, "1e308GB/s", "0-99999999999", "0:99999999999"),
)
NAMES = ("", "nan", "-1", "9" * 5000)  # of files: one name is like another
# How a number is written in options that are more than a number.
_FORMS = {
    "--scale": ("comm={}", "compute=1:{}:0.5", "compute=0.5:1:{}"),
    "--set": ("compute={}ms",),
    "--fuse-below": ("{}us",),
    "--inter-start": ("{}us",),
    "--intra-start": ("{}us",),
    "--link-bandwidth": ("{}GB/s",),
    "--bw-inter": ("{}GB/s",),
    "--bw-intra": ("{}GB/s",),
    "--fail-if": ("iteration.mean_ns > {}", "iteration.mean_ns > +{}%"),
    "--hot-ranks": ("0:{}", "{}:2"),
    "--over": ("zipf_alpha={}", "num_nodes={}", "seq_len={}", "seed={}"),
    "--dask": ("tcp://127.0.0.1:{}",),
    "--instance": ("0:{}",),
    "--memory": ("{}GiB",),
    "--seq-len": ("{}Ki", "4096,{}"),
    "--world-size": ("8-{}", "8,{}"),
}


# What else is said with an option, so that nothing waits.
_AT_ONCE = {"--dask": ("--dask-wait=0.1",)}
# The words with which a command does its work on the inputs of `make`.
_BASES = {
    "info": "{run}",
    "metrics": "{run} --json",
    "report": "{run} --no-path --no-data",
    "compare": "{run} {run}",
    "watch": "{windows} --once",
    "baseline save": "kept {run}",
    "kernels": "{run} --json",
    "sql": "{run} {query} --json",
    "critical-path": "{run} --annotation ProfilerStep",
    "what-if": "{run} --remove gaps --annotation ProfilerStep",
    "stragglers": "{table}",
    "hang": "{hangs}",
    "isp": "--model 7B --world-size 8 --seq-len 4Ki --global-batch 1Mi",
    "plan": "--model 7B --gpus 8 --global-batch 8",
    "dispatch generate": "-o drawn --num-nodes 1 --seq-len 64 --iter-num 1",
    "dispatch compare": "--num-nodes 1 --seq-len 64 --iter-num 1",
    "dispatch simulate": "{workload}",
    "dispatch place": "{workload}",
    "dispatch sweep": "--over topk=2 --num-nodes 1 --seq-len 64 --iter-num 1",
    "dispatch evaluate": "{exchanges} --cluster dgx-h100",
    "dpro stats": "{trial}",
    "dpro replay": "{trial}",
    "dpro convert": "{trial} all.json",
    "ingest": "{run} -o stored",
    "convert": "{run} all.json",
    "mcp": "{run}",
    "skill": "",
    "demo": "{directory} --num-ranks 1",
    "doctor": "",
    "completion": "{shell}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line, and the value that is extreme in it."""

    parameter: str
    value: str
    words: tuple[str, ...]


def make(folder: Path) -> dict[str, str]:
    """Make small inputs of every command, by the names that `_BASES` has for them."""
    write(Job.of(ranks=2, steps=2, layers=1), folder / "run")
    table, _ = write_table(TableJob.of(2, 0.0), folder / "table")
    recipe = Recipe.of(num_nodes=1, gpus_per_node=8, seq_len=64, iter_num=1)
    workload.write(recipe, folder / "workload")
    mxnet(folder / "trial")
    named = {name: str(folder / name) for name in ("run", "workload", "trial")}
    exchanges = folder / "exchanges.csv"
    exchanges.write_text(EXCHANGES, "utf-8")
    named["exchanges"] = str(exchanges)
    write_window(Job.of(ranks=2, steps=2, layers=1), folder / "windows" / "run" / "step-000002")
    named["windows"] = str(folder / "windows")
    named["hangs"] = str(RECORDED / "hangs" / "finished_moe_0")
    named["query"] = "from/**/ranks"
    return {**named, "table": str(table), "directory": "made", "shell": "bash"}


def commands() -> dict[str, click.Command]:
    """Return every command and subcommand that does something, by its words."""
    found = {}
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {below}".strip(): each for below, each in inner.items()}
    return found


def base(name: str, inputs: dict[str, str]) -> tuple[str, ...]:
    """Return the words with which a command does its work."""
    return (*name.split(), *words_of(_BASES[name], **inputs))


def cases(name: str, command: click.Command, inputs: dict[str, str]) -> Iterator[Case]:
    """Return every parameter of a command with every extreme value."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            option = max(parameter.opts, key=len).replace("_", "-")
            for form in ("{}", *_FORMS.get(option, ())):
                values = NAMES if isinstance(parameter.type, click.Path) else NUMBERS
                for value in map(form.format, values):
                    words = (
                        *base(name, inputs),
                        f"{option}={value}",
                        *_AT_ONCE.get(option, ()),
                    )
                    yield Case(parameter=option, value=value, words=words)
    positional = {key: "{" + key + "}" for key in inputs}
    takes_names = any(word in positional.values() for word in base(name, positional))
    for value in NAMES if takes_names else ():
        words = tuple(
            value if word in positional.values() else word for word in base(name, positional)
        )
        yield Case(parameter="arguments", value=value, words=words)


def run(words: Sequence[str]) -> tuple[str, str]:
    """Run a command line in an empty directory.

    Returns what became of it ("read", "refused", or what is wrong), and what was said.
    """
    with chdir(_empty()):
        began = time.process_time()
        result = CliRunner().invoke(main, list(words))
        took = time.process_time() - began
    said = result.stderr.strip()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "exception", "".join(traceback.format_exception(*(result.exc_info or ())))
    if result.exit_code not in _CODES:
        return f"exit code {result.exit_code}", said
    if took > LONGEST:
        return "slow", f"{took:.1f} s; {said}"
    if result.exit_code not in (1, 2):
        return "read", said
    # `doctor` says on stdout what is to be mended.
    is_clear = bool(said or result.stdout) and len(said.splitlines()) <= MOST_LINES
    return "refused" if is_clear else "no clear line", said


def write_line(path: Path, random: Random | None = None) -> None:
    """Write a command line: one that works, or with up to three extreme values."""
    inputs = _inputs()
    known = commands()
    name = random.choice(sorted(known)) if random else "info"
    words = base(name, inputs)
    extremes = [*cases(name, known[name], inputs)] if random else []
    # A command without options has none.
    for case in random.choices(extremes, k=3) if random and extremes else ():
        words += case.words[len(base(name, inputs)) :]
    path.write_text(json.dumps(words))


def read_line(path: Path) -> None:
    """Run the command line of a file.

    Raises
    ------
    FastcommError
        If the command line is refused in a few lines.
    RuntimeError
        If it ends in any other way.

    """
    kind, said = run(json.loads(path.read_text()))
    if kind == "refused":
        raise FastcommError(said)
    if kind != "read":
        raise RuntimeError(f"{kind}: {path.read_text()}: {said}")


def _empty() -> Path:
    """Return a directory of this process, without what earlier commands wrote."""
    folder = _folder()
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return folder


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _inputs() -> dict[str, str]:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make(Path(folder))
