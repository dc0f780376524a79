"""Write a run as a store: a directory of Parquet that every command opens like a run."""
