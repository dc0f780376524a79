"""Simulation of the all-to-all of a mixture of experts under several schedules.

Sizes are in bytes. Simulated times are in seconds as float64, unlike measured times.
"""
