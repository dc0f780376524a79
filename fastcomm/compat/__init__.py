"""Reproduce HTA, dPRO and two original simulators exactly.

A module here may import a model; no model imports a module here.
"""
