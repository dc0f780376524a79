"""The communication metrics: step breakdown, bandwidth, waits, findings; a module per question.

The trace of a rank becomes a `Partial`: tables with a row per iteration, per communication
event and per window. Partials of ranks are merged, and `result.Metrics` is computed from the
merged one.
"""
