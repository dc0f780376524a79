"""``python -P -m fastcomm.cli``."""

from fastcomm.__main__ import main

main()
