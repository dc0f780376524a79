"""Reproduce dPRO: its trials and names, statistics, replay and predictions."""
