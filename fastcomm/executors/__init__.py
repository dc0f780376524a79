"""Run work on every rank of a run: serial, in processes, or on Dask."""
