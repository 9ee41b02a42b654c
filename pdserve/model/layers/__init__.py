"""Layers of decoders: plain objects over tensors, without autograd or a registry."""
