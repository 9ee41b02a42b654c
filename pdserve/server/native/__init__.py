"""SGLang's endpoints: generate, worker API, health, tokenize, role switch."""
