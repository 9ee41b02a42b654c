"""LoRA adapters over HTTP: by model, by lora_path, in the list of models, loaded and unloaded."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config.cli import parse_server_args
from pdserve.config.lora_group import LoraConfig
from pdserve.protocol.messages import LoadLora, UnloadLora
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
LORA = LoraConfig(lora_paths="sql=/adapters/sql")


async def test_a_request_names_an_adapter_as_its_model(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, lora=LORA) as b:
        for model, lora in (("sql", "sql"), ("tiny", None), ("default", None)):
            answer = await b.http.post("/v1/completions", json={"prompt": "x", "model": model})
            assert answer.status_code == 200 and b.scheduler.requests[-1].lora == lora
            chat = {"messages": [{"role": "user", "content": "x"}], "model": model}
            answer = await b.http.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200 and b.scheduler.requests[-1].lora == lora
            answer = await b.http.post("/v1/responses", json={"input": "x", "model": model})
            assert answer.status_code == 200 and b.scheduler.requests[-1].lora == lora
        answer = await b.http.post("/v1/completions", json={"prompt": "x", "model": "no"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found") and "'tiny', 'sql'" in error["message"]
        cards = (await b.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("sql", "tiny")]
        assert (await b.http.get("/v1/models/sql")).json()["root"] == "/adapters/sql"


async def test_the_native_api_names_it_by_lora_path(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, lora=LORA) as b:
        for given, expected in (("sql", ["sql", "sql"]), (["sql", None], ["sql", None]), (None, [None, None])):
            answer = await b.http.post("/generate", json={"text": ["x", "y"], "lora_path": given})
            assert answer.status_code == 200
            assert [request.lora for request in b.scheduler.requests[-2:]] == expected
        answer = await b.http.post("/generate", json={"text": "x", "lora_path": "no"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_path")
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", json={"text": "x", "lora_path": "sql"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        answer = await b.http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        assert answer.status_code == 400 and "--enable-lora" in answer.text


async def test_adapters_are_loaded_and_unloaded(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, lora=LoraConfig(enable_lora=True)) as b:
        body = {"lora_name": "a", "lora_path": "/a"}
        answer = await b.http.post("/load_lora_adapter", json=body)
        assert answer.json() == {"success": True, "loaded_adapters": {"a": "/a"}}
        assert isinstance(command := b.scheduler.commands[-1], LoadLora) and (command.name, command.path) == ("a", "/a")
        assert (await b.http.post("/generate", json={"text": "x", "lora_path": "a"})).status_code == 200
        answer = await b.http.post("/load_lora_adapter", json=body)
        assert answer.status_code == 400 and "loaded already" in answer.json()["error_message"]
        assert (await b.http.post("/load_lora_adapter", json=body | {"lora_name": "tiny"})).status_code == 400
        answer = await b.http.post("/unload_lora_adapter", json={"lora_name": "a"})
        assert answer.json() == {"success": True, "loaded_adapters": {}}
        assert isinstance(b.scheduler.commands[-1], UnloadLora)
        assert (await b.http.post("/generate", json={"text": "x", "lora_path": "a"})).status_code == 404
        b.scheduler.busy = True
        answer = await b.http.post("/load_lora_adapter", json=body)
        assert (answer.status_code, answer.json()["error_message"]) == (400, "obeyed")
        assert (await b.http.post("/generate", json={"text": "x", "lora_path": "a"})).status_code == 404


async def test_an_adapter_is_unloaded_once_its_requests_have_ended(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, lora=LORA) as b:
        b.scheduler.hold = True
        running = asyncio.create_task(b.http.post("/generate", json={"text": "x", "lora_path": "sql"}))
        await until(lambda: b.scheduler.requests)
        unloading = asyncio.create_task(b.http.post("/unload_lora_adapter", json={"lora_name": "sql"}))
        while len((await b.http.get("/v1/models")).json()["data"]) == 2:
            await asyncio.sleep(0)  # lets the other tasks run
        answer = await b.http.post("/generate", json={"text": "x", "lora_path": "sql"})
        assert answer.status_code == 404 and not b.scheduler.commands and not unloading.done()
        b.scheduler.finish(b.scheduler.requests[0])
        assert (await running).status_code == 200
        assert (await unloading).json() == {"success": True, "loaded_adapters": {}}
        assert isinstance(b.scheduler.commands[-1], UnloadLora)


async def test_of_two_loads_of_one_name_the_second_sees_the_first(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, lora=LoraConfig(enable_lora=True)) as b:
        loads = [b.http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": path}) for path in ("/x", "/y")]
        answers = await asyncio.gather(*loads)
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        assert len(b.scheduler.commands) == 1
        found = next(answer for answer in answers if answer.status_code == 200).json()["loaded_adapters"]
        assert all(answer.json()["loaded_adapters"] == found for answer in answers)


async def test_the_flag_takes_several_words() -> None:
    for argv in ("--lora-paths a=/x b=/y", "--lora-paths a=/x,b=/y", "--lora-paths=a=/x --lora-paths=b=/y"):
        lora = parse_server_args([*argv.split(), "--port", "1"]).lora
        assert lora.is_on and lora.adapters == {"a": "/x", "b": "/y"}
