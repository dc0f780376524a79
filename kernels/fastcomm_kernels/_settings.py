"""Numba's settings: those of the environment, never those of a file in the working directory.

Numba reads ``.numba_config.yaml`` there when it is imported and whenever it compiles, and has
no switch against it. Where others have imported it before, its settings are theirs.
"""

import sys
import warnings
from typing import Any


def import_numba() -> None:
    """Import numba so that it reads no file of settings, now and later."""
    if "numba" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    theirs = {name: modules[name] for name in ("yaml",) if name in modules}
    modules["yaml"] = None  # as if not installed: a file is not parsed, but warned of
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A Numba config file is found")
            from numba.core import config
    finally:
        del modules["yaml"]
        modules.update(theirs)
    settings: Any = config
    settings._config_fname = ""


import_numba()
