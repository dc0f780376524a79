"""Search for the fastest way to split a model over a cluster, as InternEvo does."""
