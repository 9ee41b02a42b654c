"""The HTTP server in front of pairs: picks one, mints the room, relays decode's answer."""
