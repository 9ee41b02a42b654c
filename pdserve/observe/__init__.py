"""Prometheus metrics, traces, request logs, and the comparison of both ends of a KV transfer."""
