"""Plug-ins of pdserve that the tutorials explain: a model family, a transport, a routing policy."""
