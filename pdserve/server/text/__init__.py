"""Between text and token ids: tokenizer, chat templates, parsers of what models write, detokenizer, stop strings."""
