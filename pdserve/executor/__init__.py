"""Runs plans on a device: batch to tensors, forward pass, sampling. The scheduler thread calls it."""
