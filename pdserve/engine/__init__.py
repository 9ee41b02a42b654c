"""Assembles the engine of a replica: executor, transfer manager, role and scheduler loop, on rank 0 and on its
followers.
"""
