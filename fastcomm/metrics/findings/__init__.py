"""Findings: causes of lost time, and symptoms. A kind of finding is a module here."""
