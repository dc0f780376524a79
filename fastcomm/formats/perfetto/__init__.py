"""Read Perfetto traces (`.pftrace`)."""
