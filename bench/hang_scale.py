"""`fastcomm hang` on the dumps of 16 384 made-up ranks: time of processors, and memory.

    python bench/hang_scale.py [--folder DIR] [--ranks 16384] [--against REV]

A job of 128 ranks is played until it hangs; larger ones take its dumps as templates, with other
names and members of groups. The dumps (1.6 GB for 16 384 ranks of 2 000 calls) are written to
DIR, where they stay for the next time. The time is that of all processes of the command. On a
busy machine, pairs with another revision tell more than seconds: `--against` measures both.
"""

import argparse
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isal import igzip
from scale import used

from fastcomm.hang.command import HUNG
from fastcomm.synthetic.hangs.dumps import DumpForm, recorded
from fastcomm.synthetic.hangs.faults import PlantedHang
from fastcomm.synthetic.hangs.play import HungPlay
from fastcomm.synthetic.hangs.program import HungLayout, StepProgram

TP, PP, FEW = 8, 8, 2  # FEW is the data parallelism of the templates
STEPS = 13
CULPRIT = TP + 3  # its data-parallel rank is 1, as of one rank in every large job
SECOND = 1_000_000_000
ROOT = Path(__file__).resolve().parents[1]


def layout(ranks):
    """The layout of a job; groups have names of one length."""
    return HungLayout(tp=TP, pp=PP, dp=ranks // (TP * PP), has_hashes=True)


def hung():
    """The job of the templates: the culprit never comes to a call of the last step."""
    small = layout(TP * PP * FEW)
    program = StepProgram(layout=small, layers=4, micro_batches=8)
    step = {rank: program.turns(rank) for rank in range(small.world)}
    stuck = {CULPRIT: (STEPS - 1) * len(step[CULPRIT]) + 40}
    play = HungPlay(steps=[step] * STEPS, begin=1_795_000_000 * SECOND, stuck=stuck)
    turns = play.played
    latest = max(own[-1].calls[0].created for own in turns.values())
    return PlantedHang(
        fault="not_arrived", layout=small, turns=turns, kind="not_arrived",
        culprits=(CULPRIT,), accept=(("not_arrived", (CULPRIT,)),), moment=latest + 60 * SECOND,
    )  # fmt: skip


def text(value):
    """A text as a pickle has it."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@dataclass(frozen=True, slots=True)
class Template:
    """The pickle of a rank of the small job, which large jobs repeat."""

    content: bytes
    second: int  # in which it is written

    def of(self, old, new):
        """The pickle with the names and members of a rank's groups in a larger job."""
        content = self.content
        for one, other in zip(old, new, strict=True):
            content = content.replace(text(one.name), text(other.name))
            content = content.replace(text(str([*one.ranks])), text(str([*other.ranks])))
        return content


def pickled(content):
    """A pickle that stores no more than it refers to again, as PyTorch's."""
    return pickletools.optimize(pickle.dumps(content, 2))


def groups_of(place, rank):
    """The groups of a rank."""
    return [own[rank] for own in place.groups.values() if rank in own]


def write_some(ranks, *, world, templates, folder):
    """Write the dumps of some ranks."""
    small, large = layout(TP * PP * FEW), layout(world)
    for rank in ranks:
        tp, dp, pp = large.at(rank)
        like = tp + TP * (min(dp, 1) ^ (dp > 1)) + TP * FEW * pp
        content = templates[like].of(groups_of(small, like), groups_of(large, rank))
        packed = bytearray(igzip.compress(content, 1))
        packed[4:8] = struct.pack("<I", templates[like].second)
        (folder / f"rank_{rank}.gz").write_bytes(packed)


def write(folder, world):
    """Write the dumps of a job that are not there."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hang, form = hung(), DumpForm()
    templates = {
        rank: Template(pickled(recorded(hang, form, rank)), hang.moment // SECOND)
        for rank in hang.turns
    }
    part = partial(write_some, world=world, templates=templates, folder=folder)
    batches = [range(at, min(at + 256, world)) for at in range(0, world, 256)]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(part, batches))
    (folder / "complete").touch()


def measured(folder, root):
    """What the command takes, with the code of a folder."""
    path = f"{root}{os.pathsep}{root / 'kernels'}"
    command = [sys.executable, "-P", "-m", "fastcomm", "hang", folder, "--json"]
    return used(command, code=HUNG, env={**os.environ, "PYTHONPATH": path})


def main():
    """Write the dumps, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/hang-scale"))
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--against", help="a revision to measure beside the checkout")
    parser.add_argument("--pairs", type=int, default=1)
    options = parser.parse_args()
    folder = (options.folder / f"{options.ranks}").resolve()
    write(folder, options.ranks)
    with tempfile.TemporaryDirectory() as other:
        roots = {"checkout": ROOT}
        if options.against:
            archive = subprocess.run(
                ["git", "archive", options.against, "fastcomm", "kernels"],
                cwd=ROOT, capture_output=True, check=True,
            ).stdout  # fmt: skip
            subprocess.run(["tar", "x", "-C", other], input=archive, check=True)
            roots = {options.against: Path(other), **roots}
        for _ in range(options.pairs):
            for name, root in roots.items():
                use = measured(folder, root)
                print(
                    f"{name}: {options.ranks} ranks, {use.cpu:.1f} s of processors, "
                    f"{use.wall:.1f} s, {use.memory / 1e6:.0f} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
