"""Fuzzing of every reader: made-up files, changed at random, must be read or refused in words.

`make fuzz` runs it for FUZZ_SECONDS. A case is a seed's name and a number, from which alone its
files follow; `PYTHONPATH=tests python -m fuzz --case NAME NUMBER` runs one again and shows
where it fails.
"""
