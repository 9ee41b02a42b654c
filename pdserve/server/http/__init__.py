"""HTTP layer shared by all endpoints: bodies, errors, access rules, TLS, draining."""
