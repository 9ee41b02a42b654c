"""The names of SGLang's server flags, so that `cli` can say "not honoured" rather than "unknown". Data only."""

SGLANG_FLAGS: frozenset[str] = frozenset()
