"""Directories of ranks, some of which are unreadable."""

import gzip
import json

from builders import kineto_text as k

STEP = [k.mark("ProfilerStep#0", 0, 100), k.kernel("gemm", 5, 30), k.all_reduce(40, 20)]


NAMES = [f"host_{900 + rank}.170000000{rank}.pt.trace.json.gz" for rank in range(8)]


def spoil(path, how):
    path.unlink()
    if how == "link":
        path.symlink_to("nowhere")
    else:
        whole = gzip.compress(json.dumps(k.document(STEP, rank=3, world=8)).encode())
        path.write_bytes({"empty": b"", "cut": whole[:20], "text": b"no trace"}[how])


def write_ranks(folder):
    """Write eight ranks into a new folder, named as TensorBoard names them; return it."""
    folder.mkdir()
    for rank, name in enumerate(NAMES):
        k.write(folder / name, STEP, rank=rank, world=8)
    return folder
