"""Reproduce other tools exactly, on top of the models: HTA, dPRO and two original simulators.

A module here may import a model; no model imports a module here.
"""
