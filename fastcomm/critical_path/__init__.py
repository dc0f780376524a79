"""Critical paths: the chain of work that determines the time of a step."""
