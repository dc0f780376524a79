"""Processes of this machine, as `/proc` has them."""

from pathlib import Path


def pids_in(folder):
    """The process ids in the files of a folder, as far as they are written completely."""
    return [int(text) for path in folder.iterdir() if (text := path.read_text())]


def is_alive(pid):
    """Whether a process runs; one that has ended may wait to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
