"""What all endpoints share: bodies, errors, access rules, TLS, draining."""
