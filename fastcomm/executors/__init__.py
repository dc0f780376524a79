"""Where work on ranks runs: in processes of this machine, or on a Dask cluster."""
