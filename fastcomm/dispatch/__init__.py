"""How long the all-to-all of a mixture of experts takes by schedule, and how far from the best.

Sizes are bytes, times are seconds as float64: a simulated time is no measurement.
"""
