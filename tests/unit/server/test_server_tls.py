"""HTTPS: a real server with a certificate, clients that have one or not, wrong files; and requests that go too far."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.errors import ConfigError
from pdserve.protocol.channel import memory_channel_pair
from pdserve.server.lifecycle.instance import EngineBackend
from pdserve.server.lifecycle.run import serve
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import OPEN, ScriptedScheduler, make_config

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cert.pem`, its own authority, for 127.0.0.1, and its key: `key.pem`, and `locked.pem` with a password."""
    where = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    lock = ["openssl", "ec", "-in", "key.pem", "-aes256", "-passout", "pass:sesame", "-out", "locked.pem"]
    for each in ([*command, "-keyout", "key.pem", "-out", "cert.pem"], lock):
        subprocess.run(each, check=True, capture_output=True, timeout=30, cwd=where)
    return where


@contextlib.asynccontextmanager
async def port_of(tokenizer: Tokenizer, access: AccessConfig = OPEN) -> AsyncIterator[int]:
    """A listening server's port."""
    api, low = memory_channel_pair()
    scheduler = ScriptedScheduler(low)
    scheduler.start()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = make_config(access=access, max_request_bytes=4096)
    backend = EngineBackend(
        config=config, open_channel=lambda: api, engine_died=lambda: None, on_ready=ready.set_result
    )
    task = asyncio.create_task(serve(backend, tokenizer))
    try:
        yield await asyncio.wait_for(ready, 10.0)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 15.0) == 0
        scheduler.stop()


async def test_https_and_certificates_of_clients(tokenizer: Tokenizer, files: Path) -> None:
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    plain = AccessConfig(ssl_certfile=cert, ssl_keyfile=str(files / "locked.pem"), ssl_keyfile_password="sesame")
    assert plain.scheme == "https" and OPEN.scheme == "http"
    trusting = ssl.create_default_context(cafile=cert)
    async with port_of(tokenizer, plain) as port, httpx.AsyncClient(verify=trusting) as http:
        answer = await http.post(f"https://127.0.0.1:{port}/generate", json={"text": "hi"})
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            await http.get(f"http://127.0.0.1:{port}/health")
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"https://127.0.0.1:{port}/health")
    asking = AccessConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2)
    showing = ssl.create_default_context(cafile=cert)
    showing.load_cert_chain(cert, key)
    async with port_of(tokenizer, asking) as port:
        async with httpx.AsyncClient(verify=showing) as http:
            assert (await http.get(f"https://127.0.0.1:{port}/health")).status_code == 200
        async with httpx.AsyncClient(verify=trusting) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(f"https://127.0.0.1:{port}/health")


async def test_files_that_are_wrong_are_refused_by_flag_and_nobody_is_asked_for_a_password(files: Path) -> None:
    good = AccessConfig(ssl_certfile=str(files / "cert.pem"), ssl_keyfile=str(files / "key.pem"))
    for change, flag in (
        ({"ssl_keyfile": str(files / "locked.pem")}, "--ssl-certfile"),
        ({"ssl_keyfile": str(files / "locked.pem"), "ssl_keyfile_password": "wrong"}, "--ssl-certfile"),
        ({"ssl_certfile": str(files / "key.pem")}, "--ssl-certfile"),
        ({"ssl_ca_certs": str(files / "key.pem")}, "--ssl-ca-certs"),
    ):
        with pytest.raises(ConfigError, match=flag) as refused:
            dataclasses.replace(good, **change).tls_context()
        assert "wrong" not in str(refused.value)


async def exchange(port: int, *parts: bytes) -> bytes:
    """What the server says to raw bytes until it closes, or has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(65536), 10.0)
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


async def test_large_and_broken_requests_are_refused_before_they_cost_memory(tokenizer: Tokenizer) -> None:
    post = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with port_of(tokenizer) as port:
        for parts, statuses in (
            ((post + b"Content-Length: 99999999\r\n\r\n{",), (b"413",)),
            (
                (post + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b" " * 4096 + b"\r\n", b"1\r\n{\r\n"),
                (b"413",),
            ),
            ((post + b"Content-Length: -1\r\n\r\n",), (b"400",)),
            ((post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",), (b"400",)),
            ((post + b"X: " + b"x" * 100_000 + b"\r\n\r\n",), (b"400", b"431")),
        ):
            answer = await exchange(port, *parts)
            assert answer == b"closed" or answer[9:12] in statuses, (parts[0][:200], answer[:200])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for depth in (300, 1000, 1900):
                deep = b'{"text": "hi", "sampling_params": {"json_schema": ' + b"[" * depth + b"]" * depth + b"}}"
                answer = await http.post("/generate", content=deep)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            assert (await http.post("/generate", json={"text": "hi"})).status_code == 200
