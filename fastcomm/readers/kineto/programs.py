"""Tell which program wrote a JSON file, if that is not the PyTorch profiler."""

import re
from contextlib import suppress
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.stream import CutShortError, blocks

_RECORD = "record with torch.profiler"
_OVERLAP = 64  # bytes: no sign is longer
_TORCH_NPU = (
    "a trace of torch_npu (Ascend), whose kernels have no category; it is not read: fastcomm "
    "knows device work by the categories of the PyTorch profiler"
)
# Signs of Chrome traces that are not read, and what the file is.
_CHROME = (
    (re.compile(rb'"(?:Ascend Hardware|Overlap Analysis)"'), _TORCH_NPU),
    (
        re.compile(rb'"(?:CPU|CUDA) functions"|"cpu_to_cuda"'),
        "a trace of PyTorch's old autograd profiler, which has no categories; it is not read: "
        f"{_RECORD}",
    ),
    (
        re.compile(rb'"/(?:device|host):[A-Z]+[:"]|"hlo_(?:op|module)"'),
        "a trace of JAX or TensorFlow (XLA), which lacks the categories of the PyTorch "
        "profiler; it is not read",
    ),
    (
        re.compile(rb'"CommHash"|"cat"\s*:\s*"(?:COLL|COLL_API|P2P|P2P_API|PROXY|NET|GROUP)"'),
        "a trace of a profiler plug-in of NCCL, which lacks the work of devices; it is not "
        f"read: {_RECORD}, or with NCCL's Inspector",
    ),
)
_CHROME_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,40})"')
_MOST_NAMED = 5
# Names of events as dPRO writes them, and a member that only its traces have.
_UNIFORM = re.compile(
    rb'"all_prefix"\s*:|"name"\s*:\s*"(?:[^"\\]*->)?'
    rb"(?:(?:FW|BW|FW\+BW|Comm|COMM|COMP|HOST)\.|UPDATE_|OUTPUT|I/O)"
)
# Signs of other JSON, and what the file is.
_OTHER = (
    (
        re.compile(rb'"communicators_count"\s*:|"missing_ranks_count"\s*:'),
        "the state of a job's communicators by NCCL RAS (ncclras), no trace",
    ),
    (
        re.compile(rb'"event"\s*:\s*"PEER_|"group"\s*:\s*"LIFECYCLE"'),
        "events of NCCL RAS (ncclras in monitor mode), no trace",
    ),
)


def is_uniform(text: bytes) -> bool:
    """Return whether the events of a text have names of dPRO."""
    return _UNIFORM.search(text) is not None


def chrome(text: bytes) -> str:
    """Return what a Chrome trace without categories of the PyTorch profiler is."""
    program = next((name for sign, name in _CHROME if sign.search(text)), None)
    if program is not None:
        return program
    names = sorted({name.decode(errors="replace") for name in _CHROME_CATEGORY.findall(text)})
    shown = ", ".join(map(repr, names[:_MOST_NAMED])) + ", ..." * (len(names) > _MOST_NAMED)
    categories = f"its categories are {shown}" if names else "its events have none"
    return (
        "a Chrome trace of an unknown program, which lacks the categories of the PyTorch "
        f"profiler ({categories}); it is not read"
    )


def other(text: bytes) -> str | None:
    """Return what a JSON text without trace events is; None if that is unknown."""
    return next((name for sign, name in _OTHER if sign.search(text)), None)


def refuse(path: Path) -> None:
    """Raise TraceFileError for a trace of another program, by any sign in the whole file."""
    end = b""
    with suppress(CutShortError):
        for block in blocks(path):
            text = end + block
            for sign, name in _CHROME:
                if sign.search(text):
                    raise TraceFileError(f"{path}: {name}")
            end = text[-_OVERLAP:]
