"""Tables of operations in Parquet or CSV."""
