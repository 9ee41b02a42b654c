"""Whole deployments in one process, seeded, with faults: the real roles on a made-up network, clock and model."""
