"""Ranks of one replica: rendezvous, links, failure detection, input log, and consensus on transfers."""
