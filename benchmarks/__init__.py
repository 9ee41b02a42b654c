"""Benchmarks: each prints ratios of one run against a named peer or limit. `README.md` says what measures what."""
