"""Model code: checkpoint files, families, decoders in torch and C++, layers, and paged attention."""
