"""Describe a run, and check the installation."""
