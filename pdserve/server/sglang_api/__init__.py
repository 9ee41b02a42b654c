"""SGLang's native endpoints: generate, worker API, health, tokenize, role switch."""
