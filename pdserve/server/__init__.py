"""HTTP frontend of one server: endpoints, tokenizer, detokenizer. It talks to the scheduler through messages only."""
