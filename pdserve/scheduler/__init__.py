"""The scheduler: the step loop, batch planning, and the prefill, decode and monolith roles."""
