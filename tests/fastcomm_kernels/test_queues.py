"""Test which device goes on where several may at one time."""

import numpy as np
import pytest

from fastcomm_kernels import replay


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 9])
def test_of_devices_that_may_go_on_at_one_time_the_lowest_does(devices):
    """Each device has two nodes of 5 ns; the first nodes are those of the last device."""
    device = np.repeat(np.arange(devices)[::-1], 2)
    size = len(device)
    graph = (np.zeros(size + 1, np.int64), *(np.empty(0, kind) for kind in (int, float, int)))
    priority, took, busy = np.zeros(size, np.int64), np.full(size, 5.0), np.zeros(size)
    work = (device, priority, took, busy, np.arange(size), np.ones(size, np.int64))
    ready, free = np.zeros(size), np.zeros(devices)
    start, _, order = replay.by_time(graph, work, np.zeros(devices, np.int64), ready, free)
    assert device[order].tolist() == [*range(devices), *range(devices)]
    assert start[order].tolist() == [0.0] * devices + [5.0] * devices
