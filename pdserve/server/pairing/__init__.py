"""Requests that only a decode server got: it chooses a prefill server and sends it the other half."""
