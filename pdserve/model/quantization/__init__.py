"""Quantized checkpoints: what `quantization_config` names, and weights of 4 and 8 bits in memory."""
