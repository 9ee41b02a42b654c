"""Policies that choose the worker of a request. `make_policy` follows `config.PolicyConfig`; used by `admission`."""

from __future__ import annotations

from typing import get_args

from pdserve.base.plugins import POLICY_PLUGINS, load_plugin
from pdserve.errors import ConfigError
from pdserve.router.config.config import PolicyConfig, PrefillPolicyName, WorkerRole
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
from pdserve.router.policies.kv_index import KVAware
from pdserve.router.policies.prefix_tree import CacheAware

__all__ = ["Candidate", "KVAware", "Policy", "RoutedRequest", "make_policy"]


def make_policy(config: PolicyConfig, role: WorkerRole) -> Policy:
    """Make a new policy for the workers of one role.

    Raises:
        ConfigError: the policy is of another package, which cannot be loaded or makes something else.
    """
    name = config.of(role)
    match name:
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
        case "kv_aware":
            return KVAware(config)
        case "bucket":
            return Bucket(config)
        case "consistent_hashing":
            return ConsistentHashing()
        case _:
            return _of_package(name, config)


def _of_package(name: str, config: PolicyConfig) -> Policy:
    policy = load_plugin("policy", name, get_args(PrefillPolicyName), POLICY_PLUGINS)(config)
    if not isinstance(policy, Policy):
        text = f"--policy {name}: its package made a {type(policy).__name__}, expected a Policy"
        raise ConfigError(text, field="policy")
    return policy
