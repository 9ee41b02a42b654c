"""OpenAI-compatible endpoints: chat completions, completions, responses."""
