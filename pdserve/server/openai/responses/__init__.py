"""OpenAI's responses API, `/v1/responses`, stateless: every request carries its whole conversation."""
