"""Data of others beside the checkout, and the one place that skips tests which lack them."""

import pytest
from builders.places import ROOT

_FOLDER = ROOT.parent / "shared" / "data"


def path_of(name):
    """Return where a folder or file of the data is, or would be: `kineto/mi300_resnet`."""
    return _FOLDER / name


def needs(*names):
    """Decorate a test that reads folders or files of the data: without them it is skipped."""
    absent = [name for name in names if not path_of(name).exists()]
    return pytest.mark.skipif(bool(absent), reason=_reason(absent))


def shared(name):
    """Return a folder or file of the data; without it the test that calls is skipped."""
    if not path_of(name).exists():
        pytest.skip(_reason([name]))
    return path_of(name)


def _reason(names):
    return f"not beside the checkout: {', '.join(f'shared/data/{name}' for name in names)}"
