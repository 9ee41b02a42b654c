"""Finds prefill servers through their bootstrap servers, and looks whether peers still live.

Blocking work in threads.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdserve.errors import TransferError
from pdserve.protocol.failure import Failure
from pdserve.transfer.bootstrap import fetch_replica
from pdserve.transfer.events import Address, PeerGone, PeerListens, PrefillFound, PrefillNotFound, TransferEvent

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_PROBE_TIMEOUT_S = 2.0


class HttpDirectory:
    """`Directory` over HTTP. A server that is just starting is asked again for `patience_s`."""

    def __init__(self, post: Callable[[TransferEvent], None], token: str, patience_s: float = 3.0) -> None:
        self._post = post
        self._token = token
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-directory")
        self._probes = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-probe")
        self._closed = False

    def find(self, address: Address) -> None:
        """See `Directory`."""
        self._pool.submit(self._find, address)

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""
        self._probes.submit(self._probe, instance, endpoint)

    def close(self) -> None:
        """Let go of the threads; what they are at ends within seconds."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _find(self, address: Address) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                routes = [fetch_replica(*address, token=self._token)]
                routes += [
                    fetch_replica(*address, token=self._token, dp_rank=rank) for rank in range(1, routes[0].dp_size)
                ]
            except TransferError as error:
                if error.retryable and time.monotonic() < deadline and not self._closed:
                    time.sleep(_RETRY_S)
                    continue
                self._post(PrefillNotFound(address, Failure.from_error(error, origin=f"{address[0]}:{address[1]}")))
                return
            except Exception as error:
                log.exception("looking for the prefill server at %r failed", address)
                self._post(PrefillNotFound(address, Failure(code="bad_address", message=repr(error), retryable=False)))
                return
            replicas = tuple((route.instance, f"{route.host}:{route.port}") for route in routes)
            self._post(PrefillFound(address, replicas))
            return

    def _probe(self, instance: str, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            self._post(PeerGone(instance))
        except (OSError, ValueError, OverflowError):
            return
        else:
            self._post(PeerListens(instance))
