"""Options of dPRO trials: how to read one, and what to predict from it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.ranges import COUNT
from fastcomm.cli.said import warn

if TYPE_CHECKING:
    from fastcomm.replay.predictions import Predictions
    from fastcomm.replay.replayer import Replayer
    from fastcomm.replay.trial import Trial

F = TypeVar("F", bound=Callable[..., Any])

align = click.option(
    "--align",
    type=click.Choice(["auto", "sync", "causality", "variance", "drift", "none"]),
    default="auto",
    show_default=True,
    help="What tells the clocks of hosts: Sync, or that no RECV ends before its SEND.",
)


def trial_options(command: F) -> F:
    """The options that say how to read a trial, and what else to predict of its step."""
    for option in reversed(_options()):
        command = option(command)
    return command


def _options() -> list[Callable[[F], F]]:
    return [
        align,
        click.option(
            "--algorithm",
            type=click.Choice(["ring", "tree", "none"]),
            help="How NCCL sends: by default around its rings, where the trial has them; none: "
            "a tensor is one operation of each rank.",
        ),
        click.option(
            "--clip-updates", is_flag=True, help="Let updates begin one after the other."
        ),
        click.option(
            "--barrier", is_flag=True, help="Let updates wait for all of the communication."
        ),
        click.option(
            "--daydream",
            "with_daydream",
            is_flag=True,
            help="Predict as Daydream does: one rank, tensors at their bytes over a bandwidth.",
        ),
        click.option(
            "--hosts",
            type=click.IntRange(2, COUNT.max),
            help="Predict the step on N hosts of one GPU.",
        ),
        click.option(
            "--fuse",
            type=COUNT,
            metavar="STEPS",
            help="Search that many ways of sending tensors as one.",
        ),
    ]


def opened(path: Path, words: dict[str, Any]) -> "Trial":
    """Read a trial as the options say, and warn of what it does not tell."""
    from dataclasses import replace

    from fastcomm.errors import TraceFileError
    from fastcomm.replay import trial

    if not path.is_dir():
        raise TraceFileError(
            f"{path}: a uniform trace, or no trace at all, has no dependencies to replay; give "
            "the traces of a profiler, or a dPRO trial (a directory). `fastcomm stats` reads "
            "uniform traces"
        )
    names = ("align", "algorithm", "clip_updates")
    read = trial.read(path, **{name: words[name] for name in names})
    warn(read.warnings)
    return replace(read, graph=read.graph.with_barrier()) if words["barrier"] else read


def predicted(read: "Trial", made: "Replayer", words: dict[str, Any]) -> "Predictions":
    """Predict what the options ask for."""
    from fastcomm.replay.predictions import predictions

    names = ("with_daydream", "hosts", "fuse")
    return predictions(read, made, **{name: words[name] for name in names})
