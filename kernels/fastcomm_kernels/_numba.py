"""Import numba with the settings of the environment, not of files in the working directory.

Numba reads ``.numba_config.yaml`` there when it is imported and whenever it compiles, and has
no option against it. Modules that import numba import this one first. If another package
imported numba before, its settings stay.
"""

import sys
import warnings
from typing import Any


def import_numba() -> None:
    """Import numba so that it never reads a file of settings."""
    if "numba" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    yaml_modules = {name: modules[name] for name in ("yaml",) if name in modules}
    modules["yaml"] = None  # as if not installed: numba warns of a file instead of reading it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A Numba config file is found")
            from numba.core import config
    finally:
        del modules["yaml"]
        modules.update(yaml_modules)
    settings: Any = config
    settings._config_fname = ""


import_numba()
