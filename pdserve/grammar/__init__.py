"""Grammars that outputs must follow: what requests bring becomes masks over the vocabulary. Wraps llguidance."""
