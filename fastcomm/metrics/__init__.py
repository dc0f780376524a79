"""The communication metrics: one question a module.

A rank becomes a `Partial` (tables with a row an iteration, a row a communication event, a row a
window), partials of many ranks one, and that the answers.
"""
