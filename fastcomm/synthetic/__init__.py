"""Made-up training jobs in the formats of real profilers, with planted faults."""
