"""Prefill, decode and router each on a host of its own, behind 20 ms of delay and 1% of loss; and a partition.

By `tc netem` where the kernel has it, and by a network in user space.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.base.process import end_all
from tests.e2e.harness import GRACE_S, Server, running, until
from tests.e2e.namespaces import Host, Network
from tests.e2e.netem import NetemNetwork, why_no_netem
from tests.e2e.sglang_router import SGLangRouter
from tests.e2e.test_parity import make_prompts, reference
from tests.e2e.tun import TunNetwork, why_no_tun
from tests.reference import load_reference, reference_greedy
from tests.tiny import Family

NEW_TOKENS = 8
LONG = 3000
SGLANG_PORT = 30001
PARTITION_S = 10.0
SLOW_BYTES_PER_S = 400_000.0
"""The long prompt's KV takes some seconds then, so that there is time to cut."""
FLAGS = (
    *("--dtype", "float32", "--cpu-threads", "1", "--device", "cpu", "--max-total-tokens", "16384", "--port", "0"),
    "--no-require-control-proof",
)
"""The control token is for the servers; routers and clients have none here."""
FAILED = {499, 500, 502, 503, 504}


@pytest.fixture(scope="module", params=[(NetemNetwork, why_no_netem), (TunNetwork, why_no_tun)], ids=["netem", "tun"])
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Three hosts."""
    kind, why_not = request.param
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = kind(3, delay_s=0.02, loss=0.01)
    yield made
    made.close()


class Farm:
    """A pair and its router, one on each host."""

    def __init__(self, net: Network, model: str) -> None:
        self.net = net
        self.prefill_host, self.decode_host, self.router_host = net.hosts
        self.prefill = self._server(self.prefill_host, model, "prefill", "--disaggregation-bootstrap-port", "0")
        self.decode = self._server(self.decode_host, model, "decode")
        self.router: Server

    def _server(self, host: Host, model: str, mode: str, *flags: str) -> Server:
        argv = ["--model-path", model, "--host", host.address, "--disaggregation-mode", mode, *FLAGS, *flags]
        return Server(mode, "pdserve.launch_server", argv, before=host.argv([]))

    def start_router(self) -> Server:
        """Once both servers have said where they are."""
        pair = ["--prefill", self.prefill.url, str(self.prefill.bootstrap_port), "--decode", self.decode.url]
        argv = ["--pd-disaggregation", "--host", self.router_host.address, "--port", "0", *pair]
        self.router = Server("router", "pdserve.launch_router", argv, before=self.router_host.argv([]))
        return self.router

    def sglang_router(self) -> SGLangRouter:
        """SGLang's router on the router's host, where all ports but one are free."""
        pair = ["--prefill", self.prefill.url, str(self.prefill.bootstrap_port), "--decode", self.decode.url]
        argv = [*pair, "--prometheus-port", str(SGLANG_PORT + 1)]
        return SGLangRouter(SGLANG_PORT, argv, before=self.router_host.argv([]))

    def ask(self, input_ids: Any, url: str | None = None) -> requests.Response:
        """`/generate`, from the router's host; `url` of another router there."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling}
        path = f"{url or self.router.url}/generate"
        return self.router_host.call(lambda: requests.post(path, json=body, timeout=200))

    def ready(self) -> bool:
        """The router has a pair that it can send requests to."""
        return self.router_host.call(lambda: requests.get(f"{self.router.url}/readiness", timeout=10)).ok

    def idle(self, host: Host, server: Server) -> bool:
        """Everything is free there."""
        return not host.call(server.leaks)


@pytest.fixture(scope="module")
def farm(net: Network, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Farm]:
    """Servers behind a slow and lossy network, with a control token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CONTROL_TOKEN", "of-these-hosts")
        made = Farm(net, str(tiny_checkpoint("llama")))
    with running(made.prefill, made.decode), running(made.start_router()):
        yield made


@pytest.mark.slow
def test_tokens_are_right_behind_delay_and_loss(farm: Farm, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("llama")
    prompts = make_prompts(vocab_size=320)
    for prompt, tokens in zip(prompts, reference(model, prompts), strict=True):
        answer = farm.ask(prompt)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["output_ids"] == tokens
        timing = body["meta_info"]["timing"]
        assert timing["kv_bytes"] > 0 and timing["kv_transfer_s"] > 0
        print(f"{len(prompt)} tokens: {timing['kv_bytes']} bytes in {timing['kv_transfer_s']:.3f} s, {timing}")


def test_behind_sglangs_router(farm: Farm, tiny_checkpoint: Callable[[Family], Path]) -> None:
    prompts = make_prompts(vocab_size=320)[:1]
    (tokens,) = reference(tiny_checkpoint("llama"), prompts)
    router = farm.sglang_router()
    try:
        urls = sorted((farm.prefill.url, farm.decode.url))
        until(lambda: farm.router_host.call(router.healthy) == urls, 60, f"a router with {urls}")
        answer = farm.ask(prompts[0], router.url)
        assert answer.status_code == 200 and answer.json()["output_ids"] == tokens, answer.text
    except BaseException:
        print("\n".join(router.lines))
        raise
    finally:
        end_all([router.child], GRACE_S)


def test_a_partition_in_the_middle_of_a_transfer_ends_in_a_failure_or_in_the_right_tokens(
    farm: Farm, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    model = tiny_checkpoint("llama")
    prompt = [3 + 7 * index % 300 for index in range(LONG)]
    expected = reference_greedy(load_reference(model), prompt, NEW_TOKENS)
    farm.net.slow_down(SLOW_BYTES_PER_S)
    answers: list[requests.Response] = []
    asking = threading.Thread(target=lambda: answers.append(farm.ask(prompt)))
    asking.start()
    writing = lambda: farm.prefill_host.call(farm.prefill.state)["memory"]["keys_writing"] > 0  # noqa: E731
    until(lambda: writing() or not asking.is_alive(), 60, "the transfer begins")
    assert asking.is_alive(), "it was over before it could be cut"
    farm.net.cut(farm.prefill_host)
    threading.Event().wait(PARTITION_S)
    farm.net.cut()
    farm.net.slow_down(None)
    asking.join(200)
    assert not asking.is_alive(), "it hangs"
    (answer,) = answers
    print(answer.status_code, answer.text[:300])
    if answer.status_code == 200:
        assert answer.json()["output_ids"] == expected
    else:
        assert answer.status_code in FAILED and answer.json()["error"]["message"]
    until(lambda: farm.idle(farm.prefill_host, farm.prefill), 60, "prefill has let go of everything")
    until(lambda: farm.idle(farm.decode_host, farm.decode), 60, "decode has let go of everything")
    until(farm.ready, 60, "the router's health checks have found both again")
    again = farm.ask(prompt)
    assert again.status_code == 200 and again.json()["output_ids"] == expected, "and goes on serving"
