"""Models that draft tokens for speculative decoding."""
