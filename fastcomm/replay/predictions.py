"""Steps that a trial did not run: Daydream's, on other hosts, with tensors sent otherwise."""

from dataclasses import dataclass

from fastcomm.replay.daydream import daydream
from fastcomm.replay.fusion import Fusion, fusion
from fastcomm.replay.other_hosts import on_hosts
from fastcomm.replay.replayer import Replayed, Replayer
from fastcomm.replay.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What was asked for; the rest is None."""

    daydream: Replayed | None = None
    hosts: Replayed | None = None
    fusion: Fusion | None = None


def predictions(
    trial: Trial,
    made: Replayer,
    *,
    with_daydream: bool = False,
    hosts: int | None = None,
    fuse: int | None = None,
) -> Predictions:
    """Predict Daydream's step, one on `hosts` hosts, the best of `fuse` ways to send."""
    return Predictions(
        daydream=daydream(made, trial.parameters.bytes_of) if with_daydream else None,
        hosts=None if hosts is None else on_hosts(trial, made, hosts),
        fusion=None if fuse is None else fusion(trial, made, fuse),
    )
