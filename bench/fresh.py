"""Benchmarks in a fresh process."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def numbers(root, target, *words, environment=None):
    """Return the number and the noises of each benchmark by name; what fails has none.

    `root` is the checkout, `target` what pytest runs of it, with further words.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as written:
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", target, "-o", "addopts=--strict-markers"),
                *("--benchmark-timer=time.process_time", f"--numbers={written.name}", *words),
            ],
            cwd=root,
            env=environment,
            check=False,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(Path(written.name).read_text() or "{}")
