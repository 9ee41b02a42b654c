"""The live page and what it shows."""
