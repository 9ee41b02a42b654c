"""OpenAI's endpoints: chat completions, completions, responses."""
