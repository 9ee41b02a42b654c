"""Seeded simulations of whole deployments in one process: the real roles on a simulated network, clock and model."""
