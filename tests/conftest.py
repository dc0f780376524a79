"""The first call of a kernel compiles it: no deadline."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("jit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jit")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def kineto() -> Path:
    """The folder of real Kineto traces; the test is skipped where it is absent."""
    folder = SHARED / "data" / "kineto"
    if not folder.is_dir():
        pytest.skip(f"no real traces at {folder}")
    return folder
