"""Findings: causes of lost time in a run, and its symptoms. A kind of finding is a module here.

A module measures, and returns findings that say all about themselves: the sentence, the numbers
behind it, what fixes it, the command to run next, and the events and the picture that show it.
`detection` has the list of them.
"""
