"""The first call of a kernel compiles it: no deadline."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from numba.core import config

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("compiled", quick)
# Plain Python takes a thousand times as long: its examples are few, and always the same ones,
# since they have to reach every line.
settings.register_profile(
    "plain", quick, max_examples=15, derandomize=True, phases=set(Phase) - {Phase.shrink}
)
settings.load_profile("plain" if config.DISABLE_JIT else "compiled")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def kineto() -> Path:
    """The folder of real Kineto traces; the test is skipped where it is absent."""
    folder = SHARED / "data" / "kineto"
    if not folder.is_dir():
        pytest.skip(f"no real traces at {folder}")
    return folder
