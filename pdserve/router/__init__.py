"""The HTTP server in front of workers: picks a pair, generates the bootstrap room, relays decode's answer."""
