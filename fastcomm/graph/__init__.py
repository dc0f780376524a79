"""Events as nodes and typed edges: what has to wait for what."""
