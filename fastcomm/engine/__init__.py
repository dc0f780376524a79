"""Map the ranks of a run to partials: here, on one core or on several."""
