"""A cluster as somebody measured it: links from messages, arithmetic from kernels."""

from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.cluster.calibrate import Residual, calibrate
from fastcomm.cluster.cluster import Cluster
from fastcomm.cluster.compute_fit import ComputeResidual, fit_attention, fit_products
from fastcomm.cluster.measurements import read
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.isp.timed import Timed

_BENCHMARKS = (".txt", ".log", ".out", ".csv", ".parquet")
# Of the peak: clocks are boosted, and times are rounded.
_MOST = 1.1
_LINKS_ONLY = "links only: GEMM and attention keep the cluster's curves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The fitted cluster, how far its lines and curves are off, and what was not fitted."""

    cluster: Cluster
    residuals: tuple[Residual, ...] = ()
    compute: tuple[ComputeResidual, ...] = ()
    # In words.
    skipped: tuple[str, ...] = ()


def calibrated(said: str, cluster: Cluster) -> Calibrated:
    """Fit a cluster to traces, to what `fastcomm metrics` wrote, or to a benchmark of links."""
    path = Path(said)
    if not path.exists():
        raise ConfigError(f"calibration: {path}: there is no such file or folder")
    if (path / "events.parquet").exists():
        return _links(path, cluster, waits=True)
    if path.suffix in _BENCHMARKS:
        return _links(path, cluster, waits=path.suffix == ".parquet")
    return _of_run(path, cluster)


def _links(path: Path, cluster: Cluster, *, waits: bool) -> Calibrated:
    found = calibrate(cluster, read(path), waits=waits)
    why = f"{path.name} has no shapes of operators; {_LINKS_ONLY}"
    return Calibrated(
        cluster=found.cluster, residuals=found.residuals, skipped=(*found.skipped, why)
    )


def _of_run(path: Path, cluster: Cluster) -> Calibrated:
    """Both, as far as the traces tell; an error where they tell neither."""
    from fastcomm.isp.from_run import messages, work
    from fastcomm.readers.runs import open_run

    run = open_run(path)
    fitted, residuals, skipped = of_work(work(run), cluster)
    try:
        links = calibrate(fitted, messages(run), waits=True)
    except FastcommError as error:
        if not residuals:
            raise
        return Calibrated(cluster=fitted, compute=residuals, skipped=(*skipped, str(error)))
    return Calibrated(
        cluster=links.cluster,
        residuals=links.residuals,
        compute=residuals,
        skipped=(*links.skipped, *skipped),
    )


def of_work(
    found: Timed, cluster: Cluster
) -> tuple[Cluster, tuple[ComputeResidual, ...], tuple[str, ...]]:
    """Curves through timed work; what was left out, in words."""
    possible = [
        work for work in found.products if work.flops < _MOST * cluster.peak * work.seconds
    ]
    cluster, products = fit_products(cluster, possible)
    cluster, attention = fit_attention(cluster, found.attention)
    skipped = [f"{count} calls left out: {why}" for why, count in found.left_out.items()]
    if beyond := len(found.products) - len(possible):
        skipped.append(f"{beyond} calls left out: products beyond the peak of {cluster.name}")
    if not products and not attention:
        why = "no product or attention of half precision says its shapes (record_shapes=True)"
        skipped.append(f"{why}; {_LINKS_ONLY}")
    elif not products or len(attention) < 2:  # noqa: PLR2004 there and back
        missing = [] if products else ["GEMM"]
        missing += [] if len(attention) == 2 else ["attention"]  # noqa: PLR2004
        skipped.append(f"not measured: {', '.join(missing)} keeps the cluster's curve")
    elif cluster.note:
        cluster = replace(cluster, note="")
    return cluster, (*products, *attention), tuple(skipped)
