"""Constrained decoding: compiles the grammars of requests to token masks over the vocabulary. Wraps llguidance.

llguidance is imported at its first use. Without llguidance every grammar fails, and all other requests work.
"""
