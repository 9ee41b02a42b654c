"""Tiers of the prefix cache below device memory."""
