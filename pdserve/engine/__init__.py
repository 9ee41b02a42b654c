"""Assembles the engine of a replica: executor, transfer, roles and loop, on the leading rank and its followers."""
