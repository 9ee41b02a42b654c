"""Models: checkpoints and tokenizer files on disk, decoder families, layers, attention over pages."""
