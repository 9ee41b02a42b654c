"""The API process's side of the engine channel, and the state of its live requests."""
