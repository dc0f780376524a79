#!/usr/bin/env bash
# What a newcomer does: an empty clone, `make demo`, the page. Nothing is there before, neither an
# environment nor machine code of kernels; pip's own downloads are what the network gives.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# Seconds of the clock, and of processors, since the shell began; children that ended are counted.
took() {
  times >"$place/times"
  printf '%-20s %4d s; of processors, user and system: %s\n' "$1" "$SECONDS" \
    "$(tail -n 1 "$place/times")"
}

SECONDS=0
git clone --quiet "$root" "$place/fastcomm"
cd "$place/fastcomm"
took clone
make --silent .venv/.runtime
took install
make --silent demo >"$place/said"
took 'demo, with the page'
grep -q 'demo/report.html' "$place/said"
test -s demo/report.html
echo "the page has $(($(wc -c <demo/report.html) / 1000)) kB, and begins with:"
sed -n 3p "$place/said"
