"""The numbers of metrics as a text file for Prometheus.

A node exporter's textfile collector reads it. Names follow Prometheus' conventions: base units
(seconds, bytes), and the unit at the end. An unknown value is left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastcomm.files import aside
from fastcomm.metrics.result import Metrics
from fastcomm.trace.run_traces import ranges

_NS = 1e9  # of a second
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A metric of Prometheus: its name, its meaning, and its value for each set of labels."""

    name: str
    text: str
    values: tuple[tuple[Mapping[str, str], float], ...]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text format; none without a value."""
        if not self.values:
            return
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} gauge"
        for labels, value in self.values:
            inner = ",".join(f'{k}="{v.translate(_ESCAPED)}"' for k, v in labels.items())
            yield f"{self.name}{{{inner}}} {value!r}" if inner else f"{self.name} {value!r}"


_Row = tuple[Mapping[str, str], float | None]


def _gauge(name: str, text: str, rows: Iterable[_Row]) -> Gauge:
    """Return a gauge without the rows whose value is unknown."""
    values = tuple((labels, float(value)) for labels, value in rows if value is not None)
    return Gauge(name=f"fastcomm_{name}", text=text, values=values)


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / _NS


def gauges(metrics: Metrics) -> tuple[Gauge, ...]:
    """Return the gauges of a run's metrics."""
    return (*_of_run(metrics), *_by_parallelism(metrics), *_by_rank(metrics))


def _of_run(metrics: Metrics) -> Iterator[Gauge]:
    step = metrics.iteration.mean_ns
    yield _gauge("ranks", "Ranks that were measured.", [({}, len(metrics.measured_ranks))])
    yield _gauge("expected_ranks", "Ranks of the job.", [({}, metrics.expected_ranks)])
    yield _gauge("step_seconds", "Mean time of a training step.", [({}, _seconds(step))])
    yield _gauge(
        "step_p99_seconds",
        "Step time that 99 % of the steps do not exceed.",
        [({}, _seconds(metrics.iteration.p99_ns))],
    )
    yield _gauge(
        "step_part_ratio",
        "Share of the mean step by part; the parts add up to 1.",
        [({"part": part}, share) for part, share in metrics.breakdown.exact.items()],
    )
    yield _gauge(
        "overlap_ratio",
        "Share of communication time that compute overlaps.",
        [({}, metrics.overlap.average_overlap_ratio)],
    )
    yield _gauge(
        "finding_seconds",
        "Cost of a finding, time per step.",
        [
            ({"kind": finding.kind, "ranks": ranges(finding.ranks)}, finding.cost_ns / _NS)
            for finding in metrics.findings
        ],
    )


def _by_parallelism(metrics: Metrics) -> Iterator[Gauge]:
    exposure = metrics.exposure.items()
    yield _gauge(
        "exposed_seconds",
        "Communication that compute does not overlap, time of the mean step.",
        [({"parallelism": tag}, _seconds(one.exposed_ns)) for tag, one in exposure],
    )
    yield _gauge(
        "wait_seconds",
        "Exposed communication in which ranks wait for the last one, time of the mean step.",
        [({"parallelism": tag}, _seconds(one.wait_ns)) for tag, one in exposure],
    )
    yield _gauge(
        "transfer_seconds",
        "Exposed communication after the last rank arrived, time of the mean step.",
        [({"parallelism": tag}, _seconds(one.transfer_ns)) for tag, one in exposure],
    )
    yield _gauge(
        "bus_bandwidth_bytes_per_second",
        "Mean bus bandwidth of communication events, as nccl-tests define it.",
        [({"parallelism": tag}, one.avg_bus_bw) for tag, one in metrics.bandwidth.items()],
    )
    yield _gauge(
        "payload_bytes",
        "Payload of communication per step and rank.",
        [
            ({"parallelism": tag}, one.bytes_per_step_per_gpu)
            for tag, one in metrics.volume.items()
        ],
    )


def _by_rank(metrics: Metrics) -> Iterator[Gauge]:
    yield _gauge(
        "rank_step_seconds",
        "Mean time of a training step of a rank.",
        [({"rank": str(row.rank)}, _seconds(row.mean_ns)) for row in metrics.by_rank],
    )
    yield _gauge(
        "rank_wait_caused_seconds",
        "Time per step in which others wait for this rank as the last.",
        [({"rank": str(row.rank)}, row.caused_ns / _NS) for row in metrics.across.by_rank],
    )
    yield _gauge(
        "rank_wait_seconds",
        "Time per step in which a rank waits for others.",
        [
            ({"rank": str(row.rank), "parallelism": row.tag}, row.wait_ns / _NS)
            for row in metrics.across.waits
        ],
    )


def write(metrics: Metrics, path: Path, more: Iterable[Gauge] = ()) -> None:
    """Write the numbers of metrics for a textfile collector, whole or not at all.

    Parameters
    ----------
    metrics
        The metrics.
    path
        The file, whose name should end in `.prom`, as the collector reads no other.
    more
        Further gauges.

    Raises
    ------
    FastcommError
        If the file cannot be written.

    """
    lines = [line for gauge in (*gauges(metrics), *more) for line in gauge.lines()]
    with aside(path) as unfinished:
        unfinished.write_text("\n".join([*lines, ""]), "utf-8")
