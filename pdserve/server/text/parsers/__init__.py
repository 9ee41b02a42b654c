"""Reads what chat models write: reasoning, tool calls and plain text, out of text that arrives in pieces."""
