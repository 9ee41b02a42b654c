"""Grammars that outputs must follow: what requests bring becomes masks over the vocabulary. Wraps llguidance.

That is imported where it is used: where it is not installed, every grammar fails, and nothing else.
"""
