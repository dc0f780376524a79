"""Tell the devices of a process apart: each with kernels is a rank, and the host is shared."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import SMALL
from fastcomm_kernels.arrays import Flags, Ints


def busy(device: Ints, duration: Ints, count: int) -> Ints:
    """Return the devices that are ranks, of `count` devices.

    Those with less than `SMALL` of the time of kernels are none: a process may touch a device
    that it does not use.

    Parameters
    ----------
    device, duration
        Number of the device of each kernel, below `count`, and its time in ns.
    count
        Number of devices.

    """
    times = np.bincount(device, duration, count)
    return np.flatnonzero(times >= SMALL * times.sum())


def is_for_others(
    columns: Mapping[str, NDArray[Any]], is_own: Flags, is_of_others: Flags
) -> Flags:
    """Return which events are calls that launched work of other devices alone.

    Parameters
    ----------
    columns
        Kind and correlation of each event.
    is_own, is_of_others
        Whether each event is on the device, or on others.

    """
    call = columns["correlation"]
    others = np.setdiff1d(call[is_of_others], call[is_own])
    flags: Flags = (columns["kind"] == KIND["runtime"]) & np.isin(call, others)
    return flags
