"""Changes in place of simulated servers: how a `SimNode` opens another role, and how it takes other weights.

Mishaps: drain ──> SwitchRole to all replicas ──> all have it: the server is in the other pool
                                            └──> one cannot: those that have changed return
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Protocol

from pdserve.errors import ConfigError, ModelError
from pdserve.model.named_weights import NamedRows
from pdserve.protocol.messages import SwitchRole
from pdserve.protocol.weights import Preparation, PrepareWeights, weights_name
from pdserve.scheduler.role_switcher import OpenedRole
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.scheduler.weights_update import InstalledWeights
from pdserve.sim.network import SimNet
from pdserve.transfer.manager import KVManager


class RoleNode(Protocol):
    """The part of a `SimNode` that a role change needs."""

    kv: KVManager | None
    mode: str
    endpoint: str
    instance: str

    @property
    def is_quiet(self) -> bool:
        """See `SimNode`."""
        ...

    def role_change_fails(self) -> bool:
        """See `SimNode`."""
        ...

    def change_role(self, mode: str, endpoint: str, instance: str) -> SchedulerRole:
        """See `SimNode`."""
        ...


class SimMemory:
    """Implements `ReleasableMemory`: released pages are poisoned, so that a read of them changes the tokens."""

    def __init__(self, poison: Callable[[], None]) -> None:
        self._poison = poison

    def read(self, name: str, max_rows: int) -> list[NamedRows]:
        """See `ReleasableMemory`. There are no weights."""
        raise ModelError(f"this model has no tensor {name}")

    def prepare(self, tags: Collection[str]) -> None:
        """See `ReleasableMemory`. Does nothing."""

    def cancel(self) -> None:
        """See `ReleasableMemory`. Does nothing."""

    def release(self, tags: Collection[str]) -> int:
        """See `ReleasableMemory`."""
        self._poison()
        return 0

    def restore(self, tags: Collection[str]) -> None:
        """See `ReleasableMemory`. Does nothing."""


class SimRoles:
    """Implements `RoleOpener` for a simulated rank. The role and the names of the command stand in `disagg`.

    The role without transfers, while memory is released, is the present one as an instance that no peer finds. The
    resume makes another instance.
    """

    def __init__(self, node: RoleNode) -> None:
        self._node = node

    @property
    def is_quiet(self) -> bool:
        """See `RoleOpener`."""
        return self._node.is_quiet

    @property
    def present(self) -> SwitchRole:
        """See `RoleOpener`."""
        node = self._node
        names: dict[str, str | int | float | bool | None] = {
            "mode": node.mode, "endpoint": node.endpoint, "instance": node.instance
        }  # fmt: skip
        return SwitchRole(query_id="", disagg=names, server="", bootstrap_port=None, timeout_s=0.0)

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """See `RoleOpener`. Fails at random."""
        node = self._node
        if node.role_change_fails():
            raise ConfigError("injected")
        mode, endpoint, instance = (str(command.disagg[name]) for name in ("mode", "endpoint", "instance"))
        if command.server or command.disagg.get("disaggregation_mode") == "null":  # a resume, or a release
            instance = f"{node.instance}+"

        def commit() -> OpenedRole:
            role = node.change_role(mode, endpoint, instance)
            return OpenedRole(role=role, kv=node.kv)

        return commit

    def announce(self) -> None:
        """See `RoleOpener`."""


def name_of(number: int) -> str:
    """Return what rooms carry of the weights with this number."""
    return weights_name(f"v{number}", str(number))


class WeightsNode(Protocol):
    """The part of a `SimNode` that an update needs."""

    def load_ends(self) -> str | None:
        """See `SimNode`."""
        ...

    def may_install(self, query_id: str) -> bool:
        """See `SimNode`."""
        ...

    def take_weights(self, number: int) -> None:
        """See `SimNode`."""
        ...


class SharedSteps:
    """Replicas of a server that compute all steps together, as with DP attention: `num_replicas` of them.

    They take other weights once all are ready, each in a turn of its own. A step while their weights differ is an
    AssertionError.
    """

    def __init__(self, net: SimNet, num_replicas: int) -> None:
        self._net = net
        self._num_replicas = num_replicas
        self._ready: dict[str, set[WeightsNode]] = defaultdict(set)
        """By query id: where nothing runs."""
        self._num_changes: Counter[WeightsNode] = Counter()

    def may_install(self, query_id: str, replica: WeightsNode) -> bool:
        """Whether `replica`, where nothing runs, takes other weights in this turn."""
        self._ready[query_id].add(replica)
        return len(self._ready[query_id]) == self._num_replicas and self._net.rng.random() < 0.5

    def changed(self, replica: WeightsNode) -> None:
        """Note that `replica` has other weights."""
        self._num_changes[replica] += 1
        self._net.counts["weights of replicas that compute together"] += 1

    def check(self) -> None:
        """Raise AssertionError if a step that begins now is computed with different weights."""
        changes = set(self._num_changes.values())
        differ = len(changes) > 1 or (changes and len(self._num_changes) < self._num_replicas)
        assert not differ, "a step is computed with the weights of two versions"


class SimWeights:
    """Implements `RankWeights` for a simulated rank. `model_path` is the number of the weights."""

    def __init__(self, node: WeightsNode) -> None:
        self._node = node
        self._loading: int | None = None

    def begin(self, command: Preparation) -> None:
        """See `RankWeights.begin`."""
        assert isinstance(command, PrepareWeights), "the weights are a number"
        self._loading = int(command.model_path or 0)

    def loaded(self) -> str | None:
        """See `RankWeights.loaded`. Takes some turns, and fails at random."""
        failure = self._node.load_ends()
        if failure:
            self._loading = None
        return failure

    def refuse(self, query_id: str, why: str) -> None:
        """See `RankWeights.refuse`. Does nothing: simulated replicas load without each other."""

    def end_wait(self) -> None:
        """See `RankWeights.end_wait`. Does nothing."""

    def may_install(self, query_id: str) -> bool:
        """See `RankWeights.may_install`."""
        return self._node.may_install(query_id)

    def install(self, version: str | None) -> InstalledWeights:
        """See `RankWeights.install`."""
        assert self._loading is not None and version is not None, "an update without weights"
        number, self._loading = self._loading, None
        self._node.take_weights(number)
        return InstalledWeights(name_of(number), {"weight_version": version})

    def drop(self) -> None:
        """See `RankWeights.drop`."""
        self._loading = None
