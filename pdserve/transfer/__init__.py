"""KV cache transfer: transfer states, rooms, control messages, peer sessions, copy plans and transports."""
