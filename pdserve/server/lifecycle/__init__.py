"""Start, drain and end of a server, and the change of its role."""
