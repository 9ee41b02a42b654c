"""A small HTTP service that answers as a router before a healthy pair does, for tests of the operators' commands.

Tests change `workers`, `infos`, `observed` and `texts` before they call a command.
"""

from __future__ import annotations

import copy
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pdserve

FACTS = {
    "layout_fingerprint": "b3d7", "weights_fingerprint": "c3be", "page_tokens": 16, "kv_token_bytes": 768,
    "transfer_backend": "mooncake", "transfer_protocol": "rdma", "last_handshake_refusal": None,
}  # fmt: skip
STATE = {
    "memory": {"pages_total": 100, "pages_free": 80, "pages_evictable": 10},
    "facts": FACTS,
    "num_queue_reqs": 0,
    "peers": [{"endpoint": "127.0.0.1:9", "state": "ready"}],
    "failures": {},
    "audit": [],
    "oldest_orphan_s": 0.0,
}
OBSERVED = {
    "error": None,
    "server": {"mode": "prefill", "version": pdserve.__version__, "started_at": 1000.0, "status": "ready"},
    "replicas": [
        {
            "dp_rank": 0,
            "trouble": None,
            "state": {
                "running": 3, "waiting": 1,
                "pages": {"total": 100, "free": 40, "evictable": 20, "locked": 10, "leased": 30},
            },
        }
    ],
    "rates": {"generation_tokens_per_s": 123.4, "cache_hit_rate": 0.25, "spec_accept_length": None},
}  # fmt: skip


class FleetService:
    """A router before one prefill and one decode server. `keys`: the keys that it takes, empty for none.

    `alone`: it answers as the decode server itself.
    """

    def __init__(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Write nothing."""

            def do_GET(self) -> None:
                status, body = service.answer(self.path, self.headers["Authorization"])
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.prefill, self.decode = self.url, f"http://localhost:{self.port}"
        self.keys: tuple[str, ...] = ()
        self.alone = False
        self.workers = [self._worker("prefill", self.prefill), self._worker("decode", self.decode)]
        self.infos = {one["url"]: self._info(one["worker_type"]) for one in self.workers}
        self.router = {"version": pdserve.__version__, "serving": True, "queued": 2, "time": 1090.0}
        self.pairs = [{"prefill": self.prefill, "decode": self.decode, "serving": True, "error": None}]
        self.edges = [
            {
                "from": "a:1", "to": "b:1", "from_url": self.prefill, "to_url": self.decode, "in_flight": 2,
                "gb_per_s": 1.25, "bytes": 3_000_000_000, "transfers": 7, "failures": 1, "peer_state": "ready",
            }
        ]  # fmt: skip
        self.observed = {one["url"]: copy.deepcopy(OBSERVED) for one in self.workers}
        self.texts = {"/metrics": "up 1\n", "/engine_metrics": "up 1\n", "/health": "{}"}
        self._thread.start()

    def use_tls(self, cert: Path, key: Path) -> None:
        """Serve HTTPS from now on; `url` changes with it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End the service."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _worker(self, role: str, url: str) -> dict[str, Any]:
        return {
            "url": url, "worker_type": role, "is_healthy": True, "draining": False, "breaker": "closed",
            "last_error": None,
        }  # fmt: skip

    def _info(self, role: str) -> dict[str, Any]:
        state = copy.deepcopy(STATE)
        return {
            "disaggregation_mode": role,
            "disaggregation_bootstrap_port": self.port,
            "version": pdserve.__version__,
            "control_token_id": "0badcafe",
            "model_type": "llama",
            "vocab_size": 320,
            "served_model_name": "m",
            "kv_cache_dtype": "auto",
            "replica_health": [{"dp_rank": 0, "alive": True, "trouble": None}],
            "facts": state["facts"] | {"control_endpoint": f"127.0.0.1:{self.port}"},
            "internal_states": [state],
            "host_facts": {
                "time_s": time.time(), "memory_available_bytes": 8 << 30, "memory_total_bytes": 16 << 30,
                "shm_free_bytes": 8 << 30, "rdma_devices": ["mlx5_0"],
                "rdma_ports": {"mlx5_0:1": "ACTIVE", "mlx5_0:2": "DOWN"},
            },
        }  # fmt: skip

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        """Return status and body."""
        if self.keys and (authorization or "").removeprefix("Bearer ") not in self.keys:
            return 401, b'{"error": {"message": "a key is missing or wrong"}}'
        if path in self.texts:
            return 200, self.texts[path].encode()
        found = self._objects().get(path)
        if found is None:
            return 404, b'{"error": {"message": "no such path"}}'
        return 200, json.dumps(found).encode()

    def _objects(self) -> dict[str, Any]:
        if self.alone:
            observed = self.observed[self.decode] | {"edges": self.edges, "requests": []}
            return {"/get_server_info": self.infos[self.decode], "/observe": observed, "/v1/models": {"data": []}}
        by_role: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": [], "regular": []}
        for worker in self.workers:
            if worker["url"] in self.infos and worker["is_healthy"]:
                by_role[worker["worker_type"]].append(self.infos[worker["url"]] | {"url": worker["url"]})
        shown = [one | {"observed": self.observed.get(one["url"], {})} for one in self.workers]
        return {
            "/workers": {"workers": self.workers},
            "/get_server_info": self.infos[self.decode] | by_role,
            "/observe": {"router": self.router, "workers": shown, "pairs": self.pairs, "edges": self.edges},
            "/v1/models": {"data": [{"id": "m"}]},
            "/get_loads": {"workers": []},
        }
