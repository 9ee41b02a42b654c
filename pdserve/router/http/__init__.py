"""What the router's endpoints share: errors, access rules, TLS, tracing."""
