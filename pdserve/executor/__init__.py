"""Runs plans on a device: batch to tensors, forward pass, sampling. Called by the scheduler thread only."""
