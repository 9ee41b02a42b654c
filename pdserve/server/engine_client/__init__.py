"""The API process's end of the engine channel, and the state of its live requests."""
