"""GPUs, links and measured curves of clusters, as data."""
