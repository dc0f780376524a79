"""SQL over a run: DuckDB on the traces and results of all ranks, read as a query needs them."""
