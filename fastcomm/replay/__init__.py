"""Replay a step on devices that do one operation at a time, as measured or changed."""
