"""OpenAI's responses API, `/v1/responses`, without memory: every request brings its whole conversation."""
