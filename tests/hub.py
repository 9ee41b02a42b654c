"""A small Hugging Face hub over HTTP, and caches as huggingface_hub lays them out, for tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED, BROKEN = "org/gated", "org/broken"
"""Models that the hub answers with 403 and with 500."""


def files_of(directory: Path) -> dict[str, bytes]:
    """Read the files of a model directory, by name."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def lay_out(cache: Path, repo: str, files: Mapping[str, bytes], revision: str = "main") -> Path:
    """Write `files` of `repo` into `cache` as huggingface_hub does; return the snapshot's directory."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for directory in (home / "blobs", home / "refs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(COMMIT)
    for name, content in files.items():
        blob = home / "blobs" / hashlib.sha1(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


class FakeHub:
    """Serves the files of some models, by repository. `asked` has the paths of all requests, `tokens` their tokens.

    `held` is a file that is not sent until `close`; `is_holding` tells that it was asked for.
    """

    def __init__(self, models: Mapping[str, Mapping[str, bytes]]) -> None:
        self.models = models
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.held = ""
        self.is_holding, self._let_go = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def downloaded(self) -> set[str]:
        """Names of the files that were sent."""
        return {path.rpartition("/")[2] for path in self.asked if path.startswith("GET ") and "/resolve/" in path}

    def wait_if_held(self, name: str) -> None:
        """Called before `name` is sent."""
        if name == self.held:
            self.is_holding.set()
            self._let_go.wait()

    def close(self) -> None:
        """Stop serving."""
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def fake_hub(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Run a hub during the block."""
    hub = FakeHub(models)
    try:
        yield hub
    finally:
        hub.close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization"))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._api("/".join(parts[2:4]), parts[4:])
            else:
                self._file("/".join(parts[:2]), parts[-1])

        do_HEAD = do_GET

        def _api(self, repo: str, rest: list[str]) -> None:
            files = hub.models.get(repo)
            if repo == GATED:
                self._fail(403, "GatedRepo")
            elif repo == BROKEN:
                self._fail(500, "")
            elif files is None:
                self._fail(404, "RepoNotFound")
            elif rest[-1:] not in (["main"], [COMMIT]):
                self._fail(404, "RevisionNotFound")
            elif rest[0] == "tree":
                self._send(json.dumps([_entry(name, content) for name, content in files.items()]).encode())
            else:
                siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
                self._send(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

        def _file(self, repo: str, name: str) -> None:
            content = hub.models.get(repo, {}).get(name)
            if content is None:
                self._fail(404, "EntryNotFound")
                return
            if self.command == "GET":
                hub.wait_if_held(name)
            self._send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def _send(self, body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

        def _fail(self, status: int, code: str) -> None:
            self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": "refused"}, status)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    return Handler


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
