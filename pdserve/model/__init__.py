"""Model code: checkpoint and tokenizer files, decoder families, layers, and paged attention."""
