"""Ollama's API, `/api/chat`, `/api/generate` and the facts of models, over the chat path (`--enable-ollama-api`)."""
