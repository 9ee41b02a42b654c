"""Layers of model families: plain objects over tensors, without autograd or a registry."""
