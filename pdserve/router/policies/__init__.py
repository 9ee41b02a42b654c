"""Policies that choose the worker of a request. `make_policy` follows `config.PolicyConfig`; used by `admission`."""

from __future__ import annotations

from pdserve.router.config.config import PolicyConfig, WorkerRole
from pdserve.router.policies.basic import (
    Bucket,
    Candidate,
    ConsistentHashing,
    LeastLoaded,
    Policy,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    RoutedRequest,
)
from pdserve.router.policies.prefix_tree import CacheAware

__all__ = ["Candidate", "Policy", "RoutedRequest", "make_policy"]


def make_policy(config: PolicyConfig, role: WorkerRole) -> Policy:
    """Make a new policy for the workers of one role."""
    match config.of(role):
        case "random":
            return RandomChoice()
        case "round_robin":
            return RoundRobin()
        case "power_of_two":
            return PowerOfTwo()
        case "least_loaded":
            return LeastLoaded()
        case "cache_aware":
            return CacheAware(config)
        case "bucket":
            return Bucket(config)
        case "consistent_hashing":
            return ConsistentHashing()
