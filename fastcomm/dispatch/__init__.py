"""Simulate the all-to-all of a mixture of experts under several schedules."""
