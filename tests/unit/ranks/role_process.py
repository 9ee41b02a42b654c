"""One rank of a replica of two that is asked to change its role, in a process of its own.

Run as `python role_process.py RENDEZVOUS RANK MODEL`. Rank 1 cannot open the parts of its first new role. Rank 0
prints, as one line of JSON, the replies to its commands and the tokens of a request before and after them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys

import msgspec

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import DisaggConfig, DisaggMode, ServerConfig
from pdserve.engine import follower_role
from pdserve.engine.build import run_scheduler
from pdserve.engine.build_follower import run_follower
from pdserve.engine.build_transfer import ReplicaId
from pdserve.errors import ConfigError
from pdserve.executor.factory import LoadedEngine
from pdserve.model.parallel import Parallel
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.messages import (
    CommandReply,
    OutputBatch,
    Shutdown,
    SwitchRole,
    ToApi,
)
from tests.unit.ranks.rank_process import REQUESTS, TOKEN, Client, server_config

ROLES: tuple[DisaggMode, ...] = ("prefill", "prefill", "decode", "null")
SHM = DisaggConfig(disaggregation_transfer_backend="shm", disaggregation_host="127.0.0.1")


class RoleClient(Client):
    """Asks for a request, then for each of `ROLES` once the reply to the one before has come, then for the request."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[bool, str]] = []
        self.roles: list[str] = []
        self.found: list[list[int]] = []
        while self.recv(0.0) is not None:
            pass
        self._ask("first")

    def _ask(self, rid: str) -> None:
        self.tokens[rid] = []
        self._asked.put(msgspec.structs.replace(REQUESTS["long"], rid=rid))

    def _next(self) -> None:
        number = len(self.replies)
        if number == len(ROLES):
            self._ask("last")
            return
        disagg = dataclasses.replace(SHM, disaggregation_mode=ROLES[number])
        fields = dataclasses.asdict(disagg)
        self._asked.put(
            SwitchRole(query_id=str(number), disagg=fields, server="s", bootstrap_port=None, timeout_s=10.0)
        )

    def send(self, message: ToApi) -> None:
        match message:
            case EngineReady():
                self.roles.append(str(message.facts["disaggregation_mode"]))
            case CommandReply():
                self.replies.append((message.ok, message.message))
                self._next()
            case OutputBatch():
                for output in message.outputs:
                    self.tokens[output.rid] += output.token_ids
                    if output.finish is not None:
                        self.found.append(self.tokens[output.rid])
                        if output.rid == "first":
                            self._next()
                        else:
                            self._asked.put(Shutdown())


def fail_once() -> None:
    """Let this rank's first role change fail."""
    opens, failed = follower_role.open_parts, list[bool]()

    def failing(config: ServerConfig, built: LoadedEngine, parallel: Parallel, dp_rank: int) -> object:
        if not failed:
            failed.append(True)
            raise ConfigError("this rank has no NIC", field="disaggregation_ib_device")
        return opens(config, built, parallel, dp_rank)

    follower_role.open_parts = failing  # type: ignore[assignment]


def main() -> int:
    rendezvous, rank, model = sys.argv[1:4]
    logging.basicConfig(format="%(message)s")
    config = dataclasses.replace(server_config(model, 2, 1, overlap=False), disagg=SHM)
    if int(rank) == 0:
        client = RoleClient()
        run_scheduler(config, client, ReplicaId(server="s", rendezvous=rendezvous), TOKEN)
        print(json.dumps([client.replies, client.roles, client.found]), flush=True)
    else:
        fail_once()
        run_follower(config, ParallelShape(tp_size=2).coord(1), rendezvous, TOKEN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
