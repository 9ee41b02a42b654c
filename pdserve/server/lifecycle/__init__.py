"""Start, drain and shutdown of a server, and the switch of its role."""
