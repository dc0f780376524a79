"""A run as a directory of Parquet files: written, read, checked."""
