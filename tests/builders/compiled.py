"""Compile the kernels: every command runs once, on small inputs."""

import tempfile
from pathlib import Path

from fuzz import options

from fastcomm.preparation import compile_critical_path

if __name__ == "__main__":
    compile_critical_path("hta")
    with tempfile.TemporaryDirectory() as folder:
        inputs = options.make(Path(folder))
        for name in options.commands():
            options.run(options.base(name, inputs))
