"""`pdserve.launch_server`, but peers are told the ports of proxies of `benchmarks.chaos` instead of the server's own.

A server has no flag for that: its control socket and its Mooncake engines choose their ports and tell peers these. So
the two places where a port is chosen are changed here, in every process of the server: multiprocessing runs the main
module of its parent again in each process that it spawns.
"""

from __future__ import annotations

import os
import sys

from benchmarks.chaos_proxies import CONTROL, MOONCAKE, ask_for_proxy
from pdserve import launch_server
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.transports.mooncake import MooncakeReceiver

REGISTRAR_VARIABLE, NAME_VARIABLE = "PDSERVE_CHAOS_REGISTRAR", "PDSERVE_CHAOS_NAME"
"""Where proxies are asked for, and what the farm calls this server."""


def advertise_proxies(registrar: int, name: str) -> None:
    """Have control sockets and receiving engines of this process tell peers a proxy's port."""
    open_socket, start_engine = ZmqControlSocket.__init__, MooncakeReceiver.__init__

    def proxied(kind: str, where: str) -> str:
        host, _, port = where.rpartition(":")
        return f"{host}:{ask_for_proxy(registrar, name, kind, int(port))}"

    def open_proxied(self: ZmqControlSocket, host: str, token: str = "") -> None:
        open_socket(self, host, token)
        self.endpoint = proxied(CONTROL, self.endpoint)

    def start_proxied(self: MooncakeReceiver, host: str, protocol: str, ib_device: str) -> None:
        start_engine(self, host, protocol, ib_device)
        self.session = proxied(MOONCAKE, self.session)
        self.address = f"{self.session}/{self.address.partition('/')[2]}"

    ZmqControlSocket.__init__ = open_proxied  # type: ignore[method-assign]
    MooncakeReceiver.__init__ = start_proxied  # type: ignore[method-assign,assignment]


if __name__ in ("__main__", "__mp_main__"):
    advertise_proxies(int(os.environ[REGISTRAR_VARIABLE]), os.environ[NAME_VARIABLE])
if __name__ == "__main__":
    sys.exit(launch_server.main())
