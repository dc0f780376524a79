"""Test which device goes on where several may at one time."""

import numpy as np
import pytest

from fastcomm_kernels import replay


def without_edges(nodes):
    """The graph of nodes that wait for nothing."""
    return np.zeros(nodes + 1, np.int64), *(np.empty(0, kind) for kind in (int, float, int))


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 9])
def test_of_devices_that_may_go_on_at_one_time_the_lowest_does(devices):
    """Each device has two nodes of 5 ns; the first nodes are those of the last device."""
    device = np.repeat(np.arange(devices)[::-1], 2)
    size = len(device)
    priority, took, busy = np.zeros(size, np.int64), np.full(size, 5.0), np.zeros(size)
    work = (device, priority, took, busy, np.arange(size), np.ones(size, np.int64))
    ready, free = np.zeros(size), np.zeros(devices)
    start, _, order = replay.by_time(
        without_edges(size), work, np.zeros(devices, np.int64), ready, free
    )
    assert device[order].tolist() == [*range(devices), *range(devices)]
    assert start[order].tolist() == [0.0] * devices + [5.0] * devices


def test_a_device_runs_what_is_ready_first_whatever_its_place():
    """Each of 40 nodes ends before the next one is ready."""
    ready = 10.0 * np.random.default_rng(0).permutation(40)
    nodes, took = np.arange(40), np.full(40, 5.0)
    work = (0 * nodes, 0 * nodes, took, np.zeros(40), nodes, np.ones(40, np.int64))
    start, _, order = replay.by_time(
        without_edges(40), work, np.zeros(1, np.int64), ready, np.zeros(1)
    )
    assert order.tolist() == np.argsort(ready).tolist()
    assert start.tolist() == ready.tolist()
