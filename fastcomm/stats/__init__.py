"""Operations of a run by name: how often, and how long."""
