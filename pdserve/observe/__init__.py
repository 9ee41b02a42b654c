"""What servers and router tell: Prometheus metrics, traces, logs, and the comparison of both ends of a transfer."""
