"""Building blocks of model families: plain objects over tensors, no autograd, no registry."""
