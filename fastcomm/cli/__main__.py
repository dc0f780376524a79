"""``python -m fastcomm.cli``."""

from fastcomm.cli import main

main(prog_name="fastcomm")
