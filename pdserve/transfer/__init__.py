"""KV transfer: states, rooms, messages between peers, sessions, plans, and the transports that move bytes."""
