"""The bootstrap server over real HTTP: what it accepts, what it refuses and how it says so, and its clients."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import requests

from pdserve.base.proof import PROOF_HEADER
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.bootstrap import BootstrapServer
from pdserve.transfer.bootstrap_client import BootstrapError, fetch_facts, fetch_replica, register_route
from pdserve.transfer.bootstrap_routes import ReplicaRoute

HOST = "127.0.0.1"
SECRET = "a-secret-for-this-test"
OTHER_SECRET = "a-secret-of-others"


def route(**changes: Any) -> ReplicaRoute:
    """A valid route with changes."""
    fields: dict[str, Any] = {
        "server": "first",
        "instance": "first-0",
        "host": HOST,
        "port": 4321,
        "page_size": 16,
        "kv_cache_dtype": "float32",
        "model": "abc",
        "facts": {"num_layers": 2, "pdserve_version": "1"},
    }
    return ReplicaRoute(**(fields | changes))


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    running = BootstrapServer(HOST, 0)
    yield running
    running.close()


def get(server: BootstrapServer, path: str, **query: object) -> requests.Response:
    return requests.get(f"http://{HOST}:{server.port}{path}", params={k: str(v) for k, v in query.items()}, timeout=5)


def put(server: BootstrapServer, body: bytes) -> requests.Response:
    return requests.put(f"http://{HOST}:{server.port}/route", data=body, timeout=5)


def test_a_registered_replica_and_the_shared_facts_are_found(server: BootstrapServer) -> None:
    register_route(HOST, server.port, route())
    assert fetch_replica(HOST, server.port) == route()
    facts = fetch_facts(HOST, server.port)
    assert (facts.server, facts.tp_size, facts.page_size) == ("first", 1, 16)
    assert facts.facts == {"num_layers": 2, "pdserve_version": "1"}


def test_before_all_replicas_are_there_it_says_503_and_clients_may_retry(server: BootstrapServer) -> None:
    assert get(server, "/health").status_code == 503
    register_route(HOST, server.port, route(dp_size=2, dp_rank=1))
    assert get(server, "/health").status_code == 503
    with pytest.raises(TransferError, match="503") as caught:
        fetch_facts(HOST, server.port)
    assert caught.value.retryable
    assert caught.value.code == "bootstrap_unready"
    register_route(HOST, server.port, route(dp_size=2, dp_rank=0, port=999))
    assert get(server, "/health").status_code == 200
    assert fetch_replica(HOST, server.port, dp_rank=1).port == 4321
    assert fetch_replica(HOST, server.port, dp_rank=0).port == 999


def test_a_replica_that_does_not_exist_is_404_and_not_retryable(server: BootstrapServer) -> None:
    register_route(HOST, server.port, route())
    with pytest.raises(TransferError, match="404") as caught:
        fetch_replica(HOST, server.port, dp_rank=3)
    assert not caught.value.retryable


def test_a_server_that_was_started_anew_replaces_its_former_self(server: BootstrapServer) -> None:
    for rank in (0, 1):
        register_route(HOST, server.port, route(dp_size=2, dp_rank=rank))
    register_route(HOST, server.port, route(server="second", page_size=64, port=77))
    assert fetch_facts(HOST, server.port).page_size == 64
    assert fetch_replica(HOST, server.port).port == 77
    assert get(server, "/route", target_dp_group=1).status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        {"engine_rank": 0, "target_dp_group": 1, "target_pp_rank": 0},
        {"target_tp_rank": 0, "prefill_dp_rank": 1, "prefill_cp_rank": 0, "target_pp_rank": 0},
        {"target_dp_group": 1},
        {"engine_rank": 3, "target_dp_group": 1, "target_pp_rank": 1},
    ],
)
def test_sglang_s_old_and_new_query_names_find_the_same_replica(server: BootstrapServer, query: dict[str, int]) -> None:
    for rank in (0, 1):
        register_route(HOST, server.port, route(tp_size=4, pp_size=2, dp_size=2, dp_rank=rank, port=1000 + rank))
    assert get(server, "/route", **query).json()["port"] == 1001


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "80"}, "port"),
        ({"host": ""}, "host"),
        ({"instance": None}, "instance"),
        ({"page_size": -1}, "page_size"),
        ({"page_size": 16.5}, "page_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"dp_rank": 1}, "dp_rank"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": 4, "dp_size": 2}, "dp_rank"),
        ({"engine_rank": 1}, "engine_rank"),
        ({"kv_cache_dtype": 7}, "kv_cache_dtype"),
        ({"facts": {"a": [1]}}, "facts"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name_and_counted(
    server: BootstrapServer, change: dict[str, Any], named: str
) -> None:
    fields = msgspec.to_builtins(route()) | change
    answer = put(server, msgspec.json.encode(fields))
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert server.rejected == 1
    assert get(server, "/health").status_code == 503


SGLANG_RANK = {
    "attn_tp_size": 2, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0,
    "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.7", "rank_port": 4000,
    "page_size": 64, "kv_cache_dtype": "auto", "load_balance_method": "round_robin", "prefill_http_port": 30000,
}  # fmt: skip
ALL = {"prefill_dp_rank": -1, "prefill_cp_rank": -1, "target_tp_rank": -1, "target_pp_rank": -1}


def test_answers_have_sglang_s_names_beside_ours(server: BootstrapServer) -> None:
    for rank in (0, 1):
        register_route(HOST, server.port, route(tp_size=4, pp_size=2, dp_size=2, dp_rank=rank, port=1000 + rank))
    facts = get(server, "/route", **ALL).json()
    assert {name: facts[name] for name in ("attn_tp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype")} == {
        "attn_tp_size": 4, "dp_size": 2, "pp_size": 2, "page_size": 16, "kv_cache_dtype": "float32",
    }  # fmt: skip
    older = {"prefill_attn_tp_size": 4, "prefill_dp_size": 2, "prefill_pp_size": 2, "prefill_page_size": 16}
    assert facts.items() >= older.items() and (facts["tp_size"], facts["server"]) == (4, "first")
    rank = get(server, "/route", prefill_dp_rank=1, prefill_cp_rank=0, target_tp_rank=3, target_pp_rank=1).json()
    assert (rank["rank_ip"], rank["rank_port"]) == (rank["host"], rank["port"]) == (HOST, 1001)


def test_ranks_that_register_with_sglang_s_body_are_found_by_their_ranks(server: BootstrapServer) -> None:
    first, second = SGLANG_RANK, SGLANG_RANK | {"attn_tp_rank": 1, "rank_port": 4001}
    assert put(server, msgspec.json.encode(first)).status_code == 200
    assert get(server, "/route", **ALL).status_code == 503, "one rank of two"
    assert put(server, msgspec.json.encode(second)).status_code == 200
    facts = get(server, "/route", **ALL).json()
    assert (facts["attn_tp_size"], facts["prefill_page_size"], facts["follow_bootstrap_room"]) == (2, 64, False)
    for tp_rank in (0, 1):
        answer = get(server, "/route", prefill_dp_rank=0, prefill_cp_rank=0, target_tp_rank=tp_rank, target_pp_rank=0)
        assert answer.json() == {"rank_ip": "10.0.0.7", "rank_port": 4000 + tp_rank}
    assert get(server, "/route", prefill_dp_rank=1).status_code == 404
    with pytest.raises(TransferError, match="no pdserve bootstrap server"):
        fetch_facts(HOST, server.port)


def test_replicas_of_sglang_count_by_attention_or_by_server(server: BootstrapServer) -> None:
    for rank in (0, 1):
        body = SGLANG_RANK | {"attn_tp_size": 1, "system_dp_size": 2, "system_dp_rank": rank, "rank_port": 5000 + rank}
        assert put(server, msgspec.json.encode(body)).status_code == 200
    assert get(server, "/route", prefill_dp_rank=1).json()["rank_port"] == 5001
    assert get(server, "/route", **ALL).json()["dp_size"] == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attn_tp_rank": 2}, "attn_tp_rank"),
        ({"attn_dp_rank": 1}, "attn_dp_rank"),
        ({"system_dp_size": 2, "system_dp_rank": 2}, "system_dp_rank"),
        ({"pp_rank": 1}, "pp_rank"),
        ({"rank_port": 0}, "rank_port"),
        ({"rank_ip": 7}, "rank_ip"),
        ({"attn_tp_size": 0}, "attn_tp_size"),
        ({"attn_tp_size": 4}, "attn_tp_size"),
        ({"attn_tp_size": 4096, "pp_size": 4096}, "attn_tp_size"),
        ({"page_size": 16}, "page_size"),
    ],
)
def test_a_wrong_rank_of_sglang_is_refused_by_its_field(
    server: BootstrapServer, change: dict[str, Any], named: str
) -> None:
    assert put(server, msgspec.json.encode(SGLANG_RANK)).status_code == 200
    answer = put(server, msgspec.json.encode(SGLANG_RANK | change))
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert server.rejected == 1


def test_our_replicas_are_not_replaced_by_sglang_s_body(server: BootstrapServer) -> None:
    register_route(HOST, server.port, route())
    answer = put(server, msgspec.json.encode(SGLANG_RANK))
    assert answer.status_code == 400 and "are registered" in answer.json()["error"]["message"]
    assert fetch_replica(HOST, server.port) == route()


@pytest.mark.parametrize("body", [b"", b"junk", b"[]", b"{}", b"\xff\xfe", b'{"instance": "\xff"}', b"{" * 5000])
def test_junk_is_refused_and_the_server_goes_on(server: BootstrapServer, body: bytes) -> None:
    assert put(server, body).status_code == 400
    assert server.rejected == 1
    register_route(HOST, server.port, route())
    assert fetch_facts(HOST, server.port).model == "abc"


def test_a_body_that_is_too_large_is_refused(server: BootstrapServer) -> None:
    assert put(server, b'"' + b"x" * (2 << 20) + b'"').status_code == 413
    register_route(HOST, server.port, route())


def test_replicas_of_one_server_must_agree_and_the_field_is_named(server: BootstrapServer) -> None:
    register_route(HOST, server.port, route(dp_size=2, dp_rank=0))
    with pytest.raises(TransferError, match="kv_cache_dtype") as caught:
        register_route(HOST, server.port, route(dp_size=2, dp_rank=1, kv_cache_dtype="bfloat16"))
    assert not caught.value.retryable
    assert server.rejected == 1


@pytest.mark.parametrize("value", ["x", "-2", "1e3", "", "99999999999999999999"])
def test_a_query_that_is_no_rank_is_400_and_names_the_parameter(server: BootstrapServer, value: str) -> None:
    register_route(HOST, server.port, route())
    answer = get(server, "/route", target_pp_rank=value)
    assert answer.status_code == 400
    assert "target_pp_rank" in answer.json()["error"]["message"]


@pytest.fixture
def guarded() -> Iterator[BootstrapServer]:
    running = BootstrapServer(HOST, 0, token=SECRET)
    yield running
    running.close()


def test_a_token_is_asked_of_everybody_but_the_health_check(guarded: BootstrapServer) -> None:
    for token, what in (("", "has a control token, this server has none"), (OTHER_SECRET, "another control token")):
        with pytest.raises(BootstrapError, match=what) as caught:
            register_route(HOST, guarded.port, route(), token)
        assert not caught.value.retryable
    register_route(HOST, guarded.port, route(), SECRET)
    with pytest.raises(BootstrapError, match="has a control token, this server has none"):
        fetch_facts(HOST, guarded.port)
    assert fetch_facts(HOST, guarded.port, SECRET).server == "first"
    assert fetch_replica(HOST, guarded.port, SECRET) == route()
    assert get(guarded, "/health").status_code == 200
    assert guarded.rejected == 3


def test_a_proven_refusal_is_told_by_its_kind(guarded: BootstrapServer) -> None:
    with pytest.raises(BootstrapError, match="not ready") as caught:
        fetch_replica(HOST, guarded.port, SECRET)
    assert caught.value.retryable
    with pytest.raises(BootstrapError, match="dp_rank"):
        register_route(HOST, guarded.port, route(dp_rank=3), SECRET)
    register_route(HOST, guarded.port, route(), SECRET)
    with pytest.raises(BootstrapError, match="404") as caught:
        fetch_replica(HOST, guarded.port, SECRET, dp_rank=3)
    assert not caught.value.retryable


def test_the_token_itself_opens_nothing(guarded: BootstrapServer) -> None:
    for headers in ({"Authorization": f"Bearer {SECRET}"}, {PROOF_HEADER: SECRET}, {PROOF_HEADER: "c1 " + "0" * 300}):
        url = f"http://{HOST}:{guarded.port}/route"
        assert requests.get(url, headers=headers, timeout=5).status_code == 401
        assert requests.put(url, headers=headers, data=msgspec.json.encode(route()), timeout=5).status_code == 401
    assert get(guarded, "/health").status_code == 503


def test_a_token_at_one_end_only_or_another_one_is_told_in_the_log_of_the_server(
    guarded: BootstrapServer, server: BootstrapServer, caplog: pytest.LogCaptureFixture
) -> None:
    for port, token, theirs, ours in (
        (server.port, SECRET, "has no control token, this server has one", "this server has no control token"),
        (guarded.port, OTHER_SECRET, "another control token", "the client says that its control token is another one"),
        (guarded.port, "", "a control token, this server has none", "a proof of the control token is missing"),
    ):
        caplog.clear()
        with pytest.raises(BootstrapError, match=theirs) as caught:
            fetch_replica(HOST, port, token)
        assert caught.value.code == "control_token_mismatch" and not caught.value.retryable
        assert "set PDSERVE_CONTROL_TOKEN to the same value" in str(caught.value)
        assert ours in caplog.text and "set PDSERVE_CONTROL_TOKEN to the same value" in caplog.text
        assert SECRET not in caplog.text


def test_a_recorded_exchange_and_a_changed_one_are_worth_nothing(guarded: BootstrapServer) -> None:
    register_route(HOST, guarded.port, route(), SECRET)
    relay = Relay(guarded.port)
    try:
        assert fetch_replica(HOST, relay.port, SECRET) == route()  # a wire is no danger
        recorded = next(request for request in relay.requests if b"/route" in request)
        assert SECRET.encode() not in b"".join(relay.requests)
        with socket.create_connection((HOST, guarded.port), timeout=5) as replay:
            replay.sendall(recorded)
            assert replay.recv(100).startswith(b"HTTP/1.1 401")
        relay.change = lambda answer: answer.replace(b'"port":4321', b'"port":6666')
        with pytest.raises(BootstrapError, match="not proven"):
            fetch_replica(HOST, relay.port, SECRET)
    finally:
        relay.close()


class Relay:
    """Passes requests on to the server at `port`, and answers back through `change`."""

    def __init__(self, port: int) -> None:
        self.requests: list[bytes] = []
        self.change: Callable[[bytes], bytes] = lambda answer: answer
        self._to = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: a `close` alone would not wake it in `accept`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.settimeout(5.0)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection((HOST, self._to), timeout=5) as server:
            while request := client.recv(65536):
                self.requests.append(request)
                server.sendall(request)
                client.sendall(self.change(server.recv(65536)))


def test_a_taken_port_is_a_config_error() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen") as caught:
            BootstrapServer(HOST, taken.getsockname()[1])
    assert caught.value.field == "disaggregation_bootstrap_port"


def test_a_closed_server_answers_no_more_and_clients_may_retry(server: BootstrapServer) -> None:
    register_route(HOST, server.port, route())
    server.close()
    server.close()
    with pytest.raises(TransferError) as caught:
        fetch_facts(HOST, server.port, timeout_s=2.0)
    assert caught.value.retryable
    assert caught.value.code == "bootstrap_unreachable"


def test_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        with pytest.raises(TransferError, match="no bootstrap server answers"):
            fetch_replica(HOST, silent.getsockname()[1], timeout_s=0.2)


@pytest.mark.parametrize("host", ["", "a/b", "a b", "user@host", "x?y", "a#b"])
def test_a_host_that_is_none_is_refused_without_a_request(host: str) -> None:
    with pytest.raises(TransferError, match="not a bootstrap address") as caught:
        fetch_facts(host, 80)
    assert not caught.value.retryable
