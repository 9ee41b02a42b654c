"""Proxying of a client's request: dispatch to a pair, retries, relay of the answer."""
