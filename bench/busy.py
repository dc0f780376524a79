"""Run a command several times beside busy cores, or a busy memory: do its checks still hold?

python bench/busy.py --rounds 10 -- make bench-check
"""

import argparse
import os
import signal
import subprocess
import sys

CORES = "while True: pass"
# More than a cache holds, again and again.
MEMORY = """
import numpy as np
numbers, others = np.zeros(32 << 20), np.zeros(32 << 20)
while True:
    others[:] = numbers
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="How often the command runs.")
    parser.add_argument("--memory", action="store_true", help="Copy arrays beside it.")
    parser.add_argument("command", nargs="+", help="What runs, after --.")
    options = parser.parse_args()
    code = MEMORY if options.memory else CORES
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the busy processes, too
    for number in range(1, options.rounds + 1):
        busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count())]
        try:
            subprocess.run(options.command, check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"round {number} of {options.rounds} failed: {error}")
        finally:
            for each in busy:
                each.kill()


if __name__ == "__main__":
    main()
