"""Replay of a step on its devices: a dPRO trial's or a run's, measured or changed."""
