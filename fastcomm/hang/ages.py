"""For how long calls are open, and which of them are young."""

from dataclasses import dataclass, field

import numpy as np

from fastcomm.hang.calls import DumpedJob, RankCall, RankCalls
from fastcomm_kernels.arrays import NULL

_SECOND = 1_000_000_000
YOUNG_NS = 5 * _SECOND // 2
# PyTorch names the frames of stacks between the state of a dump and its file: 1 to 8 s, when a
# process does so first. A job whose files are all of this kind is judged more slowly.
YOUNG_IF_LATE_NS = 5 * _SECOND
LATEST_S = 8
_TIMES_INTERVAL = 4
_TIMES_USUAL = 2
_SLOWEST_MS = 120_000  # in which a recorder's watchdog ends a call behind its timeout
_MS = 1_000_000


@dataclass(kw_only=True)
class Ages:
    """For how long calls are open, by the times of the files.

    `first_written` is the second of the first dump of any rank: all are of about one moment.
    `is_prompt` says whether some dump was written at once, as those without stacks are.
    """

    job: DumpedJob
    first_written: int
    is_prompt: bool
    _moments: dict[int, int | None] = field(init=False, default_factory=dict)

    def is_young(self, call: RankCall) -> bool:
        """Return whether a call has not been open for longer than calls usually are apart.

        Nor for longer than earlier ones of the group, with its operation and size, took.
        """
        calls = self.job.ranks[call.rank]
        now = self.moment(calls)
        if now is None or call.created == NULL:
            return False
        created = calls.calls.created[calls.calls.created != NULL]
        later = np.diff(created[len(created) // 2 :])
        longest = int(later.max()) if len(later) else 0
        least = YOUNG_NS if self.is_prompt else YOUNG_IF_LATE_NS
        usual = _TIMES_USUAL * calls.usual.item(call.place)
        return now - call.created < max(least, _TIMES_INTERVAL * longest, usual)

    def is_old(self, calls: RankCalls) -> bool:
        """Return whether the last call of a rank is old, or it has none."""
        last = len(calls.row) - 1
        return last < 0 or not self.is_young(calls.call(last))

    def age_of(self, call: RankCall) -> int | None:
        """Return how many ns ago a call was made; None where nothing tells."""
        now = self.moment(self.job.ranks[call.rank])
        return None if now is None or call.created == NULL else max(0, now - call.created)

    def moment(self, calls: RankCalls) -> int | None:
        """Return when the state of a dump was taken, in ns of its host.

        None if its calls are younger than the file, or would be open beyond their timeout.

        Files know the second in which they were written, which may be seconds after that: when
        the first file of the job was written, all states were about to be taken, too. Clocks
        of hosts differ, so that the first file moves another by a few seconds at most.
        """
        if calls.rank not in self._moments:
            self._moments[calls.rank] = self._moment(calls)
        return self._moments[calls.rank]

    def _moment(self, calls: RankCalls) -> int | None:
        latest = calls.latest
        if latest >= (calls.written + 1) * _SECOND:
            return None
        first = max(self.first_written, calls.written - LATEST_S)
        now = max(latest, min(first, calls.written) * _SECOND)
        return None if _is_beyond_timeout(calls, now) else now


def _is_beyond_timeout(calls: RankCalls, now: int) -> bool:
    """Return whether a call would be open for longer than its timeout, which ends it."""
    own, at = calls.calls, calls.open
    created, timeout = own.created[at], own.timeout[at]
    is_open = (own.retired[at] != 1) & (created != NULL) & (timeout > 0)
    return bool((((now - created) // _MS - _SLOWEST_MS > timeout) & is_open).any())
