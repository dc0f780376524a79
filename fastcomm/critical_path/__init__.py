"""Which chain of work sets the time of a step."""
