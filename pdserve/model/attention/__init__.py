"""Attention over the paged KV pool: one interface and several backends."""
