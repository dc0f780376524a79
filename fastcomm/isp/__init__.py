"""Which way of splitting a model over a cluster trains fastest, and fits."""
