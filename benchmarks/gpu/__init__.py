"""Checks and timings on a machine with a GPU."""
