from functools import partial

import numpy as np
import pyarrow as pa

from fastcomm.device_work.names import duration_statistics

N = 2_000_000
NAMES = 400


def events():
    """Kernels of a rank: few names have most events; durations vary by some percent."""
    random = np.random.default_rng(0)
    code = np.minimum(random.zipf(1.3, N) - 1, NAMES - 1).astype(np.int32)
    typical = random.lognormal(9.5, 1.5, NAMES)
    duration = (typical[code] * random.lognormal(0, 0.05, N)).astype(np.int64)
    names = pa.array([f"void at::native::kernel_{k}<{k}>(int)" for k in range(NAMES)])
    return pa.table(
        {"name": pa.DictionaryArray.from_arrays(code, names), "duration_ns": duration}
    )


def pandas_statistics(frame):
    groups = frame.groupby("name", observed=True)["duration_ns"]
    summed = groups.agg(["count", "sum", "mean", "min", "max"])
    summed["median"] = groups.quantile(0.5)
    summed["p95"] = groups.quantile(0.95)
    return summed.sort_values("sum", ascending=False)


def test_duration_statistics(bar):
    table = events()
    frame = table.to_pandas()
    found, expected = duration_statistics(table).to_pandas(), pandas_statistics(frame)
    assert found["total_ns"].tolist() == expected["sum"].tolist()
    np.testing.assert_allclose(found["p95_ns"], expected["p95"], rtol=5e-4)
    bar(
        "duration_statistics",
        partial(duration_statistics, table),
        partial(pandas_statistics, frame),
        count=N,
    )
