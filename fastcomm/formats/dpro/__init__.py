"""Read trials of dPRO, and uniform traces."""
