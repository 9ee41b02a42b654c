"""The servers behind the router: registry, health, circuit breakers, admission."""
