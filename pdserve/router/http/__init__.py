"""Modules shared by the router's endpoints: errors, access rules, TLS, tracing."""
