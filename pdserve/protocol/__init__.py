"""Messages between processes: requests, outputs, sampling parameters, failures; and their codec and channel."""
