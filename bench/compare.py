"""Compare this checkout with another revision: the same benchmarks of both, in pairs.

    python bench/compare.py v0.1.0 --rounds 5

A pair is measured a moment apart, each beside its yardstick. What is printed is how often as
fast the checkout is: the median of the pairs, and the least and most of them. Nothing fails: a
benchmark that does not run on the other revision is listed.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import tomllib
from pathlib import Path

import fresh

ROOT = Path(__file__).parents[1]
BARS = tomllib.loads(Path(__file__).with_name("bars.toml").read_text("utf-8"))


def main():
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="What git calls it: a tag, a branch, a commit.")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of each benchmark.")
    parser.add_argument("--only", default="test_*.py", help="Files of bench. Default: all.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        try:
            git("worktree", "add", "--quiet", "--detach", other, options.revision)
            # The same benchmarks, also those that are newer than the revision.
            for name in ("bench", "tests"):
                shutil.rmtree(other / name, ignore_errors=True)
                shutil.copytree(ROOT / name, other / name)
            print(f"times as fast as {options.revision}: median, least and most pair")
            for file in sorted((ROOT / "bench").glob(options.only)):
                pairs = [pair(other, file.name, turn % 2) for turn in range(options.rounds)]
                show(pairs)
        finally:
            if other.exists():
                # Twice forced, git also removes what it was still adding.
                git("worktree", "remove", "--force", "--force", other)


def end(number, _frame):
    """Exit by an exception, so that the worktree is removed."""
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the removal
    raise SystemExit(128 + number)


def git(*words):
    subprocess.run(["git", *map(str, words)], cwd=ROOT, check=True)


def pair(other, file, other_first):
    """Numbers of a file of benchmarks by name: of the checkout, and of the other revision."""
    roots = (other, ROOT) if other_first else (ROOT, other)
    found = {root: of_file(root, file) for root in roots}
    return found[ROOT], found[other]


def of_file(root, file):
    path = f"{root}{os.pathsep}{root / 'kernels'}"
    found = fresh.numbers(root, f"bench/{file}", environment={**os.environ, "PYTHONPATH": path})
    return {name: number for name, (number, _) in found.items()}


def show(pairs):
    for name in sorted({name for pair in pairs for each in pair for name in each}):
        ratios = [
            quotient(name, ours[name], theirs[name])
            for ours, theirs in pairs
            if name in ours and name in theirs
        ]
        if ratios:
            line = f"{statistics.median(ratios):6.3f}  {min(ratios):6.3f} {max(ratios):6.3f}"
        else:
            line = "   n/a: it does not run on one of the two"
        print(f"{name:<22} {line}", flush=True)


def quotient(name, ours, theirs):
    """How often as fast, or as small, the first is."""
    return theirs / ours if "at_most" in BARS[name] else ours / theirs


if __name__ == "__main__":
    main()
