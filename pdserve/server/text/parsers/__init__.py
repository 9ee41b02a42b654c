"""Streaming parsers of chat model output: reasoning, tool calls and content, from text that arrives in pieces."""
