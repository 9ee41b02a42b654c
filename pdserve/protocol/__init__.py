"""What crosses processes: requests, outputs, sampling, failures, and the codec and channel that carry them."""
