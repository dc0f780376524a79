"""Call `fastcomm isp` with a small problem."""

from click.testing import CliRunner

from fastcomm.cli.main import main

ASKED = ("--model", "7B", "--world-size", "16", "--seq-len", "4Ki", "--global-batch", "1Mi")


def call(*arguments, code=0):
    done = CliRunner().invoke(main, ["isp", *arguments])
    assert done.exit_code == code, done.output
    return done.output
