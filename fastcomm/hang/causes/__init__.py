"""Kinds of hangs, a module for those that are told alike."""
