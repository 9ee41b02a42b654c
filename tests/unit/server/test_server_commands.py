"""Commands, loads, and `/tokenize` over a scripted scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdserve
from pdserve.protocol.messages import ContinueGeneration, DeclarePeerDead, PauseGeneration, StartProfile, StopProfile
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import CONTEXT, bench
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]


async def test_pause_and_continue(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post("/pause_generation")).json()["status"] == "ok"
        for mode in ("abort", "retract", "in_place"):
            assert (await b.http.post("/pause_generation", json={"mode": mode})).status_code == 200
        assert (await b.http.post("/continue_generation", json={})).status_code == 200
        *pauses, last = b.scheduler.commands
        modes = [pause.mode for pause in pauses if isinstance(pause, PauseGeneration)]
        assert modes == ["abort", "abort", "retract", "in_place"] and isinstance(last, ContinueGeneration)
        answer = await b.http.post("/pause_generation", json={"mode": "later"})
        assert answer.status_code == 400 and answer.json()["param"] == "mode"


async def test_a_peer_is_declared_dead_by_its_instance(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post("/declare_peer_dead", json={"instance": "i"})).status_code == 200
        (command,) = b.scheduler.commands
        assert isinstance(command, DeclarePeerDead) and command.instance == "i"
        b.scheduler.busy = True  # it knows no such peer
        answer = await b.http.post("/declare_peer_dead", json={"instance": "j"})
        assert answer.status_code == 404 and answer.json()["param"] == "instance"
        assert (await b.http.post("/declare_peer_dead", json={})).status_code == 400


async def test_profiles(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tokenizer) as b:
        body = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"], "record_shapes": True}
        answer = await b.http.post("/start_profile", json=body)
        assert answer.status_code == 200 and answer.text.startswith("Start profiling.")
        start = b.scheduler.commands[0]
        assert isinstance(start, StartProfile) and start.query_id
        assert (start.output_dir, start.num_steps, start.activities) == (str(tmp_path), 3, ("CPU",))
        monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/somewhere")
        await b.http.get("/start_profile")
        again = b.scheduler.commands[1]
        assert isinstance(again, StartProfile) and again.output_dir == "/somewhere" and again.num_steps is None
        assert (await b.http.post("/stop_profile")).text.startswith("Stop profiling.")
        assert isinstance(b.scheduler.commands[-1], StopProfile)
        b.scheduler.busy = True
        refused = await b.http.post("/stop_profile")
        assert refused.status_code == 400 and refused.json()["error"]["message"] == "obeyed"
        for body, field in (
            ({"num_steps": 0}, "num_steps"),
            ({"activities": ["TPU"]}, "activities"),
            ({"activities": []}, "activities"),
            ({"profile_id": "../x"}, "profile_id"),
            ({"profile_id": "a\0b"}, "profile_id"),
            ({"profile_id": "x" * 500}, "profile_id"),
            ({"output_dir": "a\0b"}, "output_dir"),
            ({"num_steps": 1 << 70}, "num_steps"),
        ):
            answer = await b.http.post("/start_profile", json=body)
            assert answer.status_code == 400 and answer.json()["param"] == field


async def test_loads(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        answer = (await b.http.get("/v1/loads")).json()
        assert answer["dp_rank_count"] == 1
        (load,) = answer["loads"]
        assert (load["dp_rank"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 1, 42)
        assert load["token_usage"] == pytest.approx(42 / 1024)
        assert answer["aggregate"]["total_used_tokens"] == 42
        assert len((await b.http.get("/v1/loads?dp_rank=0")).json()["loads"]) == 1
        for wrong in ("1", "x", "-1", "%C2%B2", "9" * 5000):
            refused = await b.http.get(f"/v1/loads?dp_rank={wrong}")
            assert refused.status_code == 400 and refused.json()["param"] == "dp_rank"
        (entry,) = (await b.http.get("/get_load")).json()
        assert entry["num_tokens"] == 42


async def test_weight_version(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for path in ("/weight_version", "/get_weight_version", "/model_info"):
            assert (await b.http.get(path)).json()["weight_version"] == "default"
        meta = (await b.http.post("/generate", json={"input_ids": [5]})).json()["meta_info"]
        chat = {"messages": [{"role": "user", "content": "x"}]}
        answers = [
            (await b.http.post("/v1/completions", json={"prompt": "x"})).json(),
            (await b.http.post("/v1/chat/completions", json=chat)).json(),
        ]
        assert [meta["weight_version"], *[answer["metadata"]["weight_version"] for answer in answers]] == [
            "default"
        ] * 3
        assert (await b.http.get("/version")).json() == {"version": pdserve.__version__}


async def test_responses_name_the_version_in_a_header(tokenizer: Tokenizer) -> None:
    """Whole ones and streams, of all APIs: as it is when the first token is there."""
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", chat | {"n": 2}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", chat),
        ("/api/chat", chat),
        ("/api/generate", {"model": "tiny", "prompt": "x"}),
    ]
    async with bench(tokenizer, enable_ollama_api=True) as b:
        for version, header in (("step-1", "step-1"), ("sté p\r\n50%", "st%C3%A9 p%0D%0A50%25")):
            b.scheduler.announce(weight_version=version)
            await until(lambda version=version: b.client.weight_version == version)
            for path, body in calls:
                for stream in (False, True):
                    answer = await b.http.post(path, json=body | {"stream": stream})
                    assert (answer.status_code, answer.headers["x-weight-version"]) == (200, header), (path, stream)
        refused = await b.http.post("/generate", json={"text": 5})
        assert refused.status_code == 400 and "x-weight-version" not in refused.headers
        assert "x-weight-version" not in (await b.http.get("/v1/models")).headers


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_to_tokens_and_back(tokenizer: Tokenizer, ids: Ids, prefix: str) -> None:
    async with bench(tokenizer) as b:
        one = (await b.http.post(f"{prefix}/tokenize", json={"prompt": "xyz", "return_token_strs": True})).json()
        assert one == {"tokens": ids("xyz"), "count": 3, "max_model_len": CONTEXT, "token_strs": ["x", "y", "z"]}
        many = (await b.http.post(f"{prefix}/tokenize", json={"prompt": ["xyz", "", "世"]})).json()
        assert many["tokens"] == [ids("xyz"), [], ids("世")] and many["count"] == [3, 0, len(ids("世"))]
        back = (await b.http.post(f"{prefix}/detokenize", json={"tokens": ids("世a")})).json()
        assert back == {"text": "世a", "prompt": "世a"}
        lists = (await b.http.post(f"{prefix}/detokenize", json={"tokens": [ids("a"), ids("b")]})).json()
        assert lists["text"] == ["a", "b"]
        special = {"tokens": [*ids("a"), 0]}
        assert (await b.http.post(f"{prefix}/detokenize", json=special)).json()["text"] == "a"
        kept = (await b.http.post(f"{prefix}/detokenize", json={**special, "skip_special_tokens": False})).json()
        assert kept["text"] == "a<|end|>"


async def test_messages_to_tokens_are_what_a_chat_computes(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        tokens = (await b.http.post("/tokenize", json=body)).json()["tokens"]
        await b.http.post("/v1/chat/completions", json=body)
        assert tokens == b.scheduler.requests[0].input_ids
        bare = (await b.http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()["tokens"]
        assert bare == tokens[: len(bare)] and len(bare) < len(tokens)


async def test_what_cannot_be_tokenized_is_refused(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for path, body, field in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": [5]}, "prompt[0]"),
            ("/tokenize", {"prompt": {"a": 1}}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": "hi"}, "messages"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
            ("/detokenize", {"tokens": [5, "a"]}, "tokens"),
            ("/detokenize", {"tokens": [[5], 6]}, "tokens[1]"),
            ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ):
            answer = await b.http.post(path, json=body)
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["param"] == field, (body, answer.text)
        answer = await b.http.post("/tokenize", json={"prompt": "a", "model": "m" * 1025})
        assert (answer.status_code, answer.json()["param"]) == (400, "model")
