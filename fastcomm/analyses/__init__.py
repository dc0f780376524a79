"""Answer one question about a run each: measure, explain, compare, convert."""
