"""Request fields: schemas, sampling parameters, grammars, and their validation."""
