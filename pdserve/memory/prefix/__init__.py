"""The prefix cache: a radix tree over pages of KV. Called by `memory/lease.py` only."""
