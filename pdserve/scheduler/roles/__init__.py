"""The roles of a scheduler: prefill, decode, and monolith."""
