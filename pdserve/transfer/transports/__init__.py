"""One file per transport; `transfer.registry` maps names to transports and imports each one on demand."""
