"""Operations on devices: a graph whose nodes take time, each on a device, and its replay.

Times are float64 nanoseconds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import Floats, Ints
from fastcomm_kernels.graph import index


class DeviceSchedule(NamedTuple):
    """Start and end of each operation, and the operations in the order in which they ran."""

    start: Floats
    end: Floats
    order: Ints


@dataclass(frozen=True, kw_only=True)
class DeviceGraph:
    """Operations with the device of each, and edges from each to those that wait for it."""

    source: Ints  # of each edge
    target: Ints
    lag: Floats  # from the source's end to the target's earliest start
    at_start: Ints  # 1 where the target waits for the source's start instead
    device: Ints  # of each operation
    priority: Ints  # of those ready at once, the least runs first
    busy: Floats  # how long the device is taken after the operation
    group: Ints
    releases: Ints  # 1 where it releases an exclusive device
    kind: Ints  # of each device: 0 for one operation at a time, or UNLIMITED, EXCLUSIVE

    @cached_property
    def _successors(self) -> tuple[Ints, Ints, Floats, Ints]:
        first, edge = index(self.source.astype(np.int32), len(self.device))
        target, lag, at_start = self.target[edge], self.lag[edge], self.at_start[edge]
        return first.astype(np.int64), target, lag, at_start

    def replay(
        self, duration: Floats, ready: Floats, free: Floats, *, by_device: bool = False
    ) -> DeviceSchedule:
        """Run every operation as early as its predecessors and its device allow.

        `ready` and `free`, when operations and devices may begin, are written into. The
        earliest possible start runs next; with `by_device` the device that is free first.
        """
        work = (
            self.device,
            self.priority,
            duration,
            self.busy,
            self.group,
            self.releases,
        )
        run = kernels.by_device if by_device else kernels.by_time
        return DeviceSchedule(*run(self._successors, work, self.kind, ready, free))

    def consecutive(self, order: Ints) -> tuple[Ints, Ints]:
        """Pairs of operations that ran one after the other on a device of limited capacity."""
        nodes = order[np.argsort(self.device[order], kind="stable")]
        device = self.device[nodes]
        follows = (device[1:] == device[:-1]) & (self.kind[device[1:]] != kernels.UNLIMITED)
        return nodes[:-1][follows], nodes[1:][follows]
