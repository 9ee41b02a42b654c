"""Workers that the router finds through a Kubernetes API: labels, readiness, ends, and an API server that fails."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from pdserve.errors import ConfigError
from pdserve.launch_router import config_from, make_parser
from pdserve.router.app import ROUTER, make_app
from pdserve.router.config.config import RouterConfig
from pdserve.router.config.discovery import DiscoveryConfig, combined_selector, matches, parse_selector
from tests.unit.router.answers import begin_stream
from tests.unit.router.fake_kube import DECODE, PREFILL, FakeKube
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


def discovery(kube: FakeKube, port: int, **changes: Any) -> DiscoveryConfig:
    settings: dict[str, Any] = {
        "pd": True,
        "prefill_selector": tuple(sorted(PREFILL.items())),
        "decode_selector": tuple(sorted(DECODE.items())),
        "port": port,
        "namespace": "ns",
        "api_url": kube.url,
        "first_backoff_s": 0.01,
        "max_backoff_s": 0.05,
    }
    return DiscoveryConfig(**settings | changes)


@contextlib.asynccontextmanager
async def kube_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKube]:
    kube = FakeKube()
    await kube.start(tls)
    try:
        yield kube
    finally:
        await kube.stop()


def held_stream(end: asyncio.Event) -> Callable[..., Coroutine[Any, Any, web.StreamResponse]]:
    """Return an answer that streams an event, and its end when `end` is set."""

    async def stream(_: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(b"data: 1\n\n")
        await end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    return stream


def of_monolith(kube: FakeKube, worker: Any) -> DiscoveryConfig:
    """Return the settings of a router that finds `worker`, a monolith with the label `app=mono`."""
    selector = (("app", "mono"),)
    return discovery(kube, port_of(worker), pd=False, selector=selector, prefill_selector=(), decode_selector=())


def port_of(worker: Any) -> int:
    port = urlsplit(worker.url).port
    assert port is not None
    return port


async def listed(world: Any, url: str) -> dict[str, dict[str, Any]]:
    """Workers by IP address."""
    async with world.session.get(url + "/workers") as response:
        return {urlsplit(one["url"]).hostname: one for one in (await response.json())["workers"]}


async def metric(world: Any, url: str, name: str) -> float:
    async with world.session.get(url + "/metrics") as response:
        return float(next(line.split()[-1] for line in (await response.text()).splitlines() if line.startswith(name)))


@pytest.mark.parametrize("filters", [True, False])
def test_pods_become_workers_of_the_role_in_their_labels_and_leave_with_them(
    run_world: RunWorld, filters: bool
) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            kube.filters = filters
            port = port_of(await world.worker("p"))
            kube.put("p", "127.0.0.1", PREFILL, annotations={"sglang.ai/bootstrap-port": "7777"})
            kube.put("other", "127.0.0.9", {"app": "web"})
            kube.put("starting", "127.0.0.3", DECODE, ready=False)
            kube.put("no-address", None, DECODE, ready=False)
            async with world.router([], [], pd=True, discovery=discovery(kube, port)) as url:
                first = await world.until(lambda: listed(world, url), lambda seen: "127.0.0.1" in seen)
                assert list(first) == ["127.0.0.1"]
                assert (first["127.0.0.1"]["worker_type"], first["127.0.0.1"]["bootstrap_port"]) == ("prefill", 7777)
                kube.put("starting", "127.0.0.3", DECODE)
                both = await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                assert both["127.0.0.3"]["worker_type"] == "decode"
                kube.put("p", "127.0.0.1", {"app": "web"})
                await world.until(lambda: listed(world, url), lambda seen: list(seen) == ["127.0.0.3"])
                kube.delete("starting")
                await world.until(lambda: listed(world, url), lambda seen: not seen)
            assert kube.lists == [{"labelSelector": "app=pdserve,role in (decode,prefill)", "limit": "500"}]
            assert len(kube.watches) == 1

    run_world(scenario)


def test_requests_go_through_discovered_pods_and_a_terminating_one_is_drained(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            end = asyncio.Event()
            worker = await world.worker("r", held_stream(end))
            kube.put("r", "127.0.0.1", {"app": "mono"})
            async with world.router([], [], discovery=of_monolith(kube, worker)) as url:
                await world.until(lambda: world.healthy_urls(url), lambda urls: urls == {worker.url})
                async with world.session.post(url + "/generate", json={"text": "a", "stream": True}) as response:
                    assert response.status == 200
                    await response.content.readany()
                    kube.put("r", "127.0.0.1", {"app": "mono"}, terminating=True)
                    leaving = await world.until(lambda: listed(world, url), lambda s: s["127.0.0.1"]["draining"])
                    assert leaving["127.0.0.1"]["load"] == 1
                    kube.delete("r")
                    async with world.session.post(url + "/generate", json={"text": "b"}) as refused:
                        assert refused.status == 503
                    end.set()
                    await response.read()
                await world.until(lambda: listed(world, url), lambda seen: not seen)

    run_world(scenario)


def test_a_pod_whose_labels_come_back_while_it_drains_keeps_its_requests(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            end = asyncio.Event()
            worker, labels = await world.worker("r", held_stream(end)), {"app": "mono"}
            kube.put("r", "127.0.0.1", labels)
            async with world.router([], [], discovery=of_monolith(kube, worker)) as url:
                await world.until(lambda: world.healthy_urls(url), lambda urls: urls == {worker.url})
                before = (await listed(world, url))["127.0.0.1"]
                async with world.session.post(url + "/generate", json={"text": "a", "stream": True}) as response:
                    await response.content.readany()
                    kube.put("r", "127.0.0.1", {"app": "web"})
                    await world.until(lambda: listed(world, url), lambda seen: seen["127.0.0.1"]["draining"])
                    kube.put("r", "127.0.0.1", labels)
                    now = await world.until(lambda: listed(world, url), lambda seen: not seen["127.0.0.1"]["draining"])
                    assert (now["127.0.0.1"]["id"], now["127.0.0.1"]["load"]) == (before["id"], 1)
                    end.set()
                    assert (await response.read()).endswith(b"[DONE]\n\n")
                assert set(await listed(world, url)) == {"127.0.0.1"}

    run_world(scenario)


def test_a_pod_that_is_not_ready_gets_no_requests_while_another_one_is_ready(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            port = port_of(await world.worker("r"))
            for index in (1, 2):
                kube.put(f"r{index}", f"127.0.0.{index}", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, port)) as url:
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                registry = world.app[ROUTER].registry
                for worker in registry.workers:
                    worker.healthy = True
                role = registry.workers[0].spec.role
                kube.put("r1", "127.0.0.1", DECODE, ready=False)
                seen = await world.until(lambda: listed(world, url), lambda s: not s["127.0.0.1"]["pod_ready"])
                assert seen["127.0.0.1"]["draining"] is False
                assert [one.spec.host for one in registry.usable(role)] == ["127.0.0.2"]
                kube.put("r2", "127.0.0.2", DECODE, ready=False)
                await world.until(lambda: listed(world, url), lambda s: not s["127.0.0.2"]["pod_ready"])
                assert len(registry.usable(role)) == 2, "health checks decide where no pod is ready"
                kube.put("r1", "127.0.0.1", DECODE)
                await world.until(lambda: listed(world, url), lambda s: s["127.0.0.1"]["pod_ready"])

    run_world(scenario)


def test_a_watch_that_ends_or_breaks_goes_on_from_its_version_without_a_list(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            async with world.router([], [], pd=True, discovery=discovery(kube, 1)) as url:
                await until(lambda: len(kube.watches) == 1)
                kube.put("a", "127.0.0.1", DECODE)
                await world.until(lambda: listed(world, url), lambda seen: "127.0.0.1" in seen)
                kube.bookmark()
                for number, stop in enumerate((kube.end_watches, kube.cut_watches), start=2):
                    stop()
                    kube.put(f"a{number}", f"127.0.0.{number}", DECODE)
                    await world.until(lambda: listed(world, url), lambda seen, n=number: len(seen) == n)
                assert len(kube.lists) == 1
                versions = [int(query["resourceVersion"]) for query in kube.watches]
                assert versions == sorted(versions) and versions[1] >= 12, "the bookmark's version counts"

    run_world(scenario)


@pytest.mark.parametrize("in_stream", [True, False])
def test_an_expired_version_makes_a_new_list_and_what_was_missed_is_seen(run_world: RunWorld, in_stream: bool) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            kube.put("old", "127.0.0.1", DECODE)
            kube.put("kept", "127.0.0.2", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, 1)) as url:
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                await until(lambda: kube.watches)
                kept = (await listed(world, url))["127.0.0.2"]["id"]
                kube.refusals = [503]  # the next watch, so that the changes are missed
                kube.cut_watches()
                kube.delete("old")
                kube.put("new", "127.0.0.3", DECODE)
                if in_stream:
                    kube.changes.clear()
                    await until(lambda: len(kube.watches) >= 3)
                    kube.end_watches({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
                else:
                    kube.forget_history()
                seen = await world.until(lambda: listed(world, url), lambda s: set(s) == {"127.0.0.2", "127.0.0.3"})
                assert seen["127.0.0.2"]["id"] == kept
                assert len(kube.lists) == 2

    run_world(scenario)


def test_workers_stay_while_the_api_server_fails_and_calls_back_off(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            kube.put("a", "127.0.0.1", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, 1)) as url:
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 1)
                await until(lambda: kube.watches)
                kube.refusals = [500, 429, 403]
                kube.cut_watches()
                await until(lambda: not kube.refusals)
                assert len(await listed(world, url)) == 1
                kube.put("b", "127.0.0.2", DECODE)
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                assert await metric(world, url, "pdserve_router_discovery_failures_total") >= 4
                assert await metric(world, url, "pdserve_router_discovery_up") == 1

    run_world(scenario)


def test_long_lists_come_in_pages(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            kube.page_size = 2
            for index in range(1, 6):
                kube.put(f"p{index}", f"127.0.0.{index}", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, 1)) as url:
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 5)
            assert [query.get("continue") for query in kube.lists] == [None, "2", "4"]

    run_world(scenario)


def test_an_address_that_another_pod_takes_over_is_a_new_worker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            kube.put("a", "127.0.0.1", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, 1)) as url:
                first = await world.until(lambda: listed(world, url), lambda seen: "127.0.0.1" in seen)
                kube.put("b", "127.0.0.1", PREFILL)
                await world.until(
                    lambda: listed(world, url),
                    lambda s: (
                        s["127.0.0.1"]["worker_type"] == "prefill" and s["127.0.0.1"]["id"] != first["127.0.0.1"]["id"]
                    ),
                )
                kube.delete("a")
                kube.put("c", "127.0.0.3", DECODE)
                seen = await world.until(lambda: listed(world, url), lambda s: "127.0.0.3" in s)
                assert "127.0.0.1" in seen, "the deletion of its former pod is not its own"
                kube.put("b", "127.0.0.4", PREFILL)
                await world.until(lambda: listed(world, url), lambda s: set(s) == {"127.0.0.3", "127.0.0.4"})

    run_world(scenario)


def test_given_workers_and_those_removed_by_hand_are_left_alone(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async with kube_server() as kube:
            given = await world.worker("given")
            port = port_of(given)
            kube.put("a", "127.0.0.1", DECODE)
            kube.put("b", "127.0.0.2", DECODE)
            async with world.router([], [], pd=True, discovery=discovery(kube, port)) as url:
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                await world.session.delete(f"{url}/workers/http://127.0.0.2:{port}")
                await world.session.delete(f"{url}/workers/{given.url}")
                await world.until(lambda: listed(world, url), lambda seen: not seen)
                await world.session.post(url + "/workers", json={"url": given.url, "worker_type": "decode"})
                kube.put("b", "127.0.0.2", DECODE, annotations={"x": "y"})
                kube.put("twin", "127.0.0.1", DECODE)
                kube.delete("a")
                kube.put("c", "127.0.0.3", DECODE)
                seen = await world.until(lambda: listed(world, url), lambda s: "127.0.0.3" in s)
                assert set(seen) == {"127.0.0.1", "127.0.0.3"}

    run_world(scenario)


def test_in_a_cluster_the_token_is_read_again_when_it_is_replaced(
    run_world: RunWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    (tmp_path / "token").write_text("first\n")

    async def scenario(world: Any) -> None:
        async with kube_server(tls) as kube:
            kube.token = "first"
            address = urlsplit(kube.url)
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
            own = discovery(kube, 1, api_url=None, account_dir=tmp_path)
            async with world.router([], [], pd=True, discovery=own) as url:
                kube.put("a", "127.0.0.1", DECODE)
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 1)
                kube.token = "second"
                kube.cut_watches()
                await until(lambda: kube.tokens.count("Bearer first") >= 4)
                (tmp_path / "token").write_text("second\n")
                kube.put("b", "127.0.0.2", DECODE)
                await world.until(lambda: listed(world, url), lambda seen: len(seen) == 2)
                assert kube.tokens[-1] == "Bearer second"

    run_world(scenario)


def test_outside_a_cluster_the_router_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    own = DiscoveryConfig(pd=False, selector=(("a", "b"),), account_dir=tmp_path)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        make_app(RouterConfig(pd=False, discovery=own))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="token is missing; the pod needs a service account"):
        make_app(RouterConfig(pd=False, discovery=own))


def test_flags_are_those_of_sglang_router() -> None:
    argv = "--pd-disaggregation --service-discovery --prefill-selector app=sglang role=prefill --decode-selector"
    words = [*argv.split(), "app=sglang role=decode", "--service-discovery-namespace", "inference"]
    words += ["--service-discovery-port", "30000", "--bootstrap-port-annotation", "x.io/port"]
    found = config_from(make_parser().parse_args(words)).discovery
    assert found == DiscoveryConfig(
        pd=True,
        prefill_selector=(("app", "sglang"), ("role", "prefill")),
        decode_selector=(("app", "sglang"), ("role", "decode")),
        namespace="inference",
        port=30000,
        bootstrap_port_annotation="x.io/port",
    )
    plain = config_from(make_parser().parse_args(["--service-discovery", "--selector", "a=b"])).discovery
    assert plain is not None
    assert (plain.port, plain.bootstrap_port_annotation, plain.namespace) == (80, "sglang.ai/bootstrap-port", None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--worker-urls --selector a=b", "--selector needs --service-discovery"),
        ("--service-discovery", "needs --selector"),
        ("--service-discovery --selector a", "--selector needs labels KEY=VALUE, got 'a'"),
        ("--service-discovery --selector a=b a=c", "two values of a"),
        ("--service-discovery --selector a=-", "KEY=VALUE"),
        ("--service-discovery --selector a=b --prefill-selector c=d", "need --pd-disaggregation"),
        ("--pd-disaggregation --service-discovery", "needs --prefill-selector and --decode-selector"),
        ("--pd-disaggregation --service-discovery --selector a=b", "--selector is for regular servers"),
        ("--pd-disaggregation --service-discovery --prefill-selector a=b --decode-selector a=b", "are equal"),
        ("--service-discovery --selector a=b --service-discovery-port 0", "must be 1 to 65535"),
        ("--service-discovery --selector a=b --service-discovery-namespace A_B", "name of a namespace"),
        ("--service-discovery --selector a=b --bootstrap-port-annotation /x", "name of an annotation"),
        ("--service-discovery --selector a=b --service-discovery-api h:1", "needs a URL"),
    ],
)
def test_wrong_flags_are_named(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(make_parser().parse_args(argv.split()))


def test_selectors() -> None:
    one, two = parse_selector(["a=1,b=2", "c="], "--selector"), parse_selector(["a=1 b=3"], "--selector")
    assert one == (("a", "1"), ("b", "2"), ("c", ""))
    assert combined_selector([one]) == "a=1,b=2,c="
    assert combined_selector([one, two]) == "a=1,b in (2,3)"
    assert matches(two, {"a": "1", "b": "3", "d": "4"}) and not matches(two, {"a": "1"})
    assert not matches((), {"a": "1"})
