"""Empty: the prefix cache is in `memory/prefix_cache.py`."""
