"""Text processing: tokenizer, chat templates, parsers for reasoning and tool calls, detokenizer, stop strings."""
