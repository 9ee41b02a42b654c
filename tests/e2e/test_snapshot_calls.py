"""Streams of all kinds are suspended, their server ends, and another one resumes them: clients see one stream each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve import LLM, InvalidRequestError, SamplingParams
from pdserve.http.access import SNAPSHOT_TYPE
from pdserve.launch_local import THREAD_VARIABLES
from pdserve.server.text.tokenizer import read_template
from tests.e2e.harness import Server, assert_idle, generate_all, running_monolith, running_pair
from tests.e2e.test_python_api import QUIET, SMALL
from tests.e2e.test_retry_streams import CALLS, FLAGS, events, gist
from tests.e2e.test_snapshots import KINDS, LONG, PROMPT, assert_same, stopped
from tests.e2e.test_storage import TIER, body, prompts_of, storage_flags, until_stored
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = [name for name in CALLS if name not in ("stop", "messages", "ollama")]
"""The stop string of `stop` is known only once the whole text is. The APIs of Anthropic and Ollama go on as requests of
`/generate`."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "snapshots.md"
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")


def read_stream(answer: requests.Response, seen: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    found = []
    for line in answer.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            found.append(json.loads(line.removeprefix(b"data: ")))
            seen()
    return found


def suspended(server: Server, name: str) -> list[dict[str, Any]]:
    """Begin a stream and suspend it behind its eighth event; its events, which do not say that."""
    path, body = CALLS[name]
    due, counts = threading.Event(), iter(range(10_000))

    def seen() -> None:
        if next(counts) == 8:
            due.set()

    with ThreadPoolExecutor(1) as pool:
        url = server.url + path
        with requests.post(url, json={**body, "rid": name, "stream": True}, stream=True, timeout=300) as answer:
            reading = pool.submit(read_stream, answer, seen)
            assert due.wait(120)
            told = requests.post(f"{server.url}/suspend", json={"rid": name}, timeout=120)
            found = reading.result()
    assert told.status_code == 200 and told.json()["completion_tokens"] > 0, told.text
    if path == "/generate":
        last = found.pop()
        assert last["meta_info"]["finish_reason"]["type"] == "suspended"
        return found
    found = [event for event in found if event["choices"]]  # usage is that of the whole stream
    assert found[-1]["choices"][0]["finish_reason"] == "suspended"
    found[-1]["choices"][0]["finish_reason"] = None
    return found


def as_one(path: str, begun: Sequence[dict[str, Any]], rest: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return gist(path, [*begun, *rest])


@pytest.mark.parametrize("flags", [(), NGRAM], ids=["plain", "drafts"])
def test_another_server_resumes_the_streams(
    flags: tuple[str, ...], tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    model = str(tiny_checkpoint("llama"))
    template = tmp_path / "thinking.jinja"
    closed = "{{- '<think></think>' if add_generation_prompt and enable_thinking is false else '' }}"
    template.write_text(read_template("hermes") + closed)
    flags = (*FLAGS[:-2], *flags, "--chat-template", str(template), "--snapshot-dir", str(tmp_path / "kept"))
    with running_monolith(model, *flags) as server:
        expected = {name: gist(CALLS[name][0], events(server.url, *CALLS[name])) for name in NAMES}
        begun = {name: suspended(server, name) for name in NAMES}
        assert requests.get(f"{server.url}/get_server_info", timeout=60).json()["suspended_requests"] == len(NAMES)
        assert_idle(server)
    with running_monolith(model, *flags) as server:
        for name in NAMES:
            with requests.post(f"{server.url}/resume", json={"rid": name}, stream=True, timeout=300) as answer:
                rest = read_stream(answer)
            assert as_one(CALLS[name][0], begun[name], rest) == expected[name], name
        assert_idle(server)
    assert not list((tmp_path / "kept").iterdir())


def test_a_decode_server_gives_a_request_away_with_its_kv(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """The monolith loads the KV that decode received and computed; the decode server takes the request back."""
    model = str(tiny_checkpoint("llama"))
    body = {
        "text": "Once upon a time",
        "sampling_params": {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True},
    }
    with running_pair(model, *FLAGS) as pair, running_monolith(model, *FLAGS[:-2]) as mono:
        whole = requests.post(f"{mono.url}/generate", json=body, timeout=300).json()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(requests.post, f"{pair.url}/generate", json={**body, "rid": "a"}, timeout=300)
            while (answer := extract(pair.decode.url)).status_code == 404 and not call.done():
                pass
            assert answer.status_code == 200, answer.text
            assert call.result().json()["meta_info"]["finish_reason"]["type"] == "suspended"
        for server in (mono, pair.decode):
            again = restore(server.url, answer.content)
            assert again.status_code == 200, again.text
            assert again.json()["output_ids"] == whole["output_ids"] and again.json()["text"] == whole["text"]
        assert_idle(mono, *pair.workers)


def extract(url: str, kv: str = "bytes") -> requests.Response:
    return requests.post(f"{url}/extract", json={"rid": "a", "kv": kv}, timeout=120)


def restore(url: str, data: bytes, kv: str = "require") -> requests.Response:
    headers = {"Content-Type": SNAPSHOT_TYPE}
    return requests.post(f"{url}/restore?kv={kv}", data=data, headers=headers, timeout=300)


def events_of(stream: requests.Response) -> Iterator[Any]:
    """Yield the events of a stream of `/generate`."""
    return (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith(b"data: {"))


def test_a_restored_request_reads_its_kv_from_the_store(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """The snapshot has no KV, and the server that computed it has ended."""
    model, prompt = str(tiny_checkpoint("llama")), prompts_of(12, 1)[0]
    flags = (*TIER, *storage_flags("file", "wait_complete", directory=str(tmp_path)), "--max-total-tokens", "4096")
    with running_monolith(model, *TIER[:4], "--max-total-tokens", "4096") as alone:
        expected = generate_all(alone.url, [body(prompt, 1500)])[0]["output_ids"]
    with running_monolith(model, *flags) as server:
        asked = {**body(prompt, 1500), "rid": "a", "stream": True}
        with requests.post(f"{server.url}/generate", json=asked, stream=True, timeout=300) as stream:
            lines = events_of(stream)
            next(lines)  # the prompt is computed
            answer = extract(server.url, "none")
            *_, last = lines
        assert answer.status_code == 200, answer.text
        assert last["meta_info"]["finish_reason"]["type"] == "suspended"
        until_stored(server, 192)
    with running_monolith(model, *flags) as server:
        again = restore(server.url, answer.content, "ignore")
        assert again.status_code == 200, again.text
        *_, last = events_of(again)
        assert last["output_ids"] == expected
        assert server.counter("prefetched_tokens") >= 192
        assert_idle(server)


def test_two_ranks_give_tokens_only(tiny_checkpoint: Callable[[Family], Path]) -> None:
    params = SamplingParams(**LONG, **KINDS["seeded"])
    model = str(tiny_checkpoint("llama"))
    with LLM(model, tensor_parallel_size=2, **SMALL) as llm, LLM(model, **SMALL) as single:
        whole = llm.generate([PROMPT], params, **QUIET)[0]
        begun, snapshot = stopped(llm, params, llm.extract)
        assert begun.outputs[0].finish_reason == "suspended"
        assert_same(llm.restore(snapshot), whole)
        _, with_kv = stopped(single, params, lambda rid: single.extract(rid, kv="bytes"))
        with pytest.raises(InvalidRequestError) as caught:
            llm.restore(with_kv)
        assert caught.value.field == "snapshot.kv"
        assert_same(llm.restore(with_kv, kv="prefer"), whole)
        with pytest.raises(InvalidRequestError) as caught:
            stopped(llm, params, lambda rid: llm.extract(rid, kv="bytes"))
        assert caught.value.field == "kv"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_documentation_run(tiny_checkpoint: Callable[[Family], Path], tmp_path: Path) -> None:
    """Line by line; `job-7` begins again once it has ended on the other server."""
    model = str(tiny_checkpoint("llama"))
    params = {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True}
    body = {"text": "Once upon a time", "sampling_params": params, "rid": "job-7"}
    with running_monolith(model, *FLAGS[:-2]) as one, running_monolith(model, *FLAGS[:-2]) as other:

        def run(line: str) -> bytes:
            line = line.replace("localhost:30000", one.url).replace("other:30000", other.url)
            command = ["bash", "-c", line.replace("curl -s", "curl -sf")]
            return subprocess.run(command, cwd=tmp_path, timeout=120, check=True, capture_output=True).stdout

        whole = requests.post(f"{one.url}/generate", json=body, timeout=300).json()["output_ids"]
        lines = [line for line in examples("bash")[0].splitlines() if line]
        assert len(lines) == 4
        for stop, go_on in (lines[:2], lines[2:]):
            streamed = {**body, "stream": True}
            with requests.post(f"{one.url}/generate", json=streamed, stream=True, timeout=300) as answer:
                read = answer.iter_lines()
                assert next(read).startswith(b"data: ")
                run(stop)
                assert any(b'"suspended"' in line for line in read)
            rest = [line for line in run(go_on).splitlines() if line]
            assert rest[-1] == b"data: [DONE]"
            assert json.loads(rest[-2].removeprefix(b"data: "))["output_ids"] == whole
        assert_idle(one, other)


def test_the_program_of_the_documentation_runs_as_a_script(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(examples("python")[0].replace('"smollm2"', repr(str(tiny_checkpoint("llama")))))
    env = dict(os.environ) | dict.fromkeys(THREAD_VARIABLES, "1")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
