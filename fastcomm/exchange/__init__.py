"""Match collectives and messages across ranks, and align the ranks' clocks."""
