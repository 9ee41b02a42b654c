"""One small object per kind of server: monolith, prefill, decode. Each owns its queues."""
