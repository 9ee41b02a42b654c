"""The HTTP side of one server: endpoints, tokenizer, detokenizer. Knows the scheduler by its messages only."""
