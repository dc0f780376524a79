"""Store a run as Parquet, which every command reads faster."""
