"""SGLang's own router, the Rust program of the wheel `sglang-router`, before our servers. Used by e2e tests."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import requests

from pdserve.base.process import Child, end_all
from tests.e2e.harness import GRACE_S, Server, until

LAUNCH = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
QUICK = ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1", "--retry-max-backoff-ms", "200"]


class SGLangRouter:
    """One running router process and its workers API."""

    def __init__(self, port: int, argv: Sequence[str], *, before: Sequence[str] = ()) -> None:
        """`before`: as of `Server`."""
        self.url = f"http://127.0.0.1:{port}"
        key = argv[argv.index("--api-key") + 1] if "--api-key" in argv else None
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.lines: deque[str] = deque(maxlen=200)
        # It announces nothing on stdout; whoever starts it asks its health endpoint.
        command = [*before, *LAUNCH, *QUICK, "--port", str(port), *argv]
        self.child = Child("sglang-router", command, on_line=self.lines.append)

    def healthy(self) -> list[str]:
        """URLs of the workers that it sends requests to."""
        try:
            answer = requests.get(f"{self.url}/workers", headers=self.headers, timeout=5)
        except requests.ConnectionError:
            assert not self.child.exited, "\n".join(self.lines)
            return []
        return sorted(worker["url"] for worker in answer.json()["workers"] if worker["is_healthy"])


@contextlib.contextmanager
def running_sglang_router(
    prefill: Sequence[Server], decode: Sequence[Server], *flags: str, ports: bool = True
) -> Iterator[SGLangRouter]:
    """The real router in PD mode before running servers, ready when it has found all of them healthy. Without `ports`
    it is not given the bootstrap ports.
    """
    workers = [
        word
        for server in prefill
        for word in ("--prefill", server.url, *([str(server.bootstrap_port)] if ports else []))
    ]
    workers += [word for server in decode for word in ("--decode", server.url)]
    # Its metrics port is another fixed one: two free ports, taken together so that they differ.
    with _listening() as first, _listening() as second:
        port, metrics = (sock.getsockname()[1] for sock in (first, second))
    router = SGLangRouter(port, [*workers, "--prometheus-port", str(metrics), *flags])
    try:
        urls = sorted(server.url for server in (*prefill, *decode))
        until(lambda: router.healthy() == urls, 60.0, f"router with {urls}")
        yield router
    except BaseException:
        print("--- sglang-router\n" + "\n".join(router.lines))
        raise
    finally:
        end_all([router.child], GRACE_S)


def _listening() -> contextlib.closing[socket.socket]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return contextlib.closing(sock)
