"""Run commands as a user does, and read their outputs."""

import shlex

from click.testing import CliRunner

from fastcomm.cli.main import main


def invoke(*words, code=0):
    """Run a command; its exit code is `code`, or one of these."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    codes = code if isinstance(code, set) else {code}
    assert result.exit_code in codes, f"{result.output}{result.stderr}{result.exception!r}"
    return result


def words_of(command, **inputs):
    """The words of a command line; the path of an input may have a space."""
    return [word.format(**inputs) for word in command.split()]


def quoted(path):
    """A path as a shell reads it: it may have a space."""
    return shlex.quote(str(path))


def contents(folder):
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# Real Kineto traces, each a file or a folder.
KINETO = [
    "mi300_resnet",
    "b200_vllm",
    "h100_qwen",
    "mtia",
    "trace_diff/control.json.gz",
    "trace_diff/test.json.gz",
    "dlrm_8rank",
    "nccl_2rank_rank0.json.gz",
    "sampled_2of128",
    "gloo_4rank",
    "gloo_2x2",
]
