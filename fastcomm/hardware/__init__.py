"""Clusters and GPUs: data sheets, links, measured curves, and fits to measurements."""
