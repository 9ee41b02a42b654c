"""The workers behind the router: registry, health checks, circuit breakers, admission."""
