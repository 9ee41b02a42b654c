"""OpenAI's responses API, `/v1/responses`, with stored responses and responses in the background."""
