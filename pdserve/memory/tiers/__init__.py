"""Tiers of KV below the device: host memory, and stores that servers share."""
