"""Weights changed from disk under load: each answer comes wholly from one version's weights, and names it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.adapters import merged, write_adapter
from tests.e2e.harness import assert_idle, running_monolith, running_pair, until
from tests.model_families import prompts_of
from tests.reference import load_reference, reference_greedy
from tests.tiny import Family, make_tiny, tiny_tokenizer

NUM_NEW = 12
PROMPTS = prompts_of((7, 40, 90, 23))
CHATS: Any = [[{"role": "user", "content": text}] for text in ("Hello", "Tell me of pages.", "x" * 50)]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192", "--served-model-name", "tiny")
SAMPLING = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
CHAT_SAMPLING = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True}


class Models:
    """Two checkpoints of one model, and what each of them generates; with `has_adapter`, behind the adapter `adapter`.

    `outputs`: of each checkpoint the tokens of `PROMPTS`, then the texts of `CHATS`. `name`: that of the model in
    requests.
    """

    def __init__(self, root: Path, family: Family = "qwen3", *, has_adapter: bool = False) -> None:
        self.paths = [make_tiny(family, root / name, seed=seed, eos_token_id=None) for seed, name in enumerate("ab")]
        self.adapter, self.name, generating = root / "adapter", "tiny", self.paths
        if has_adapter:
            write_adapter(self.adapter, self.paths[0])
            self.name = "adapter"
            generating = [merged(root / f"merged-{path.name}", path, self.adapter) for path in self.paths]
        references = [load_reference(path) for path in generating]
        tokenizer = tiny_tokenizer()
        chats = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
        self.outputs: list[list[Any]] = []
        for model in references:
            tokens = [reference_greedy(model, prompt, NUM_NEW) for prompt in (*PROMPTS, *chats)]
            texts = [_whole(tokenizer.decode(ids, skip_special_tokens=True)) for ids in tokens[len(PROMPTS) :]]
            self.outputs.append([*tokens[: len(PROMPTS)], *texts])
        assert all(first != second for first, second in zip(*self.outputs, strict=True))


class Load:
    """Clients that ask the same prompts until they are stopped, and all answers: prompt, version, tokens or text.

    Of four clients one reads whole answers of `/generate`, one its streams, one streams of chat completions, and one
    whole messages. `name`: the model's, in their requests.
    """

    def __init__(self, url: str, num_clients: int, name: str = "tiny") -> None:
        self.answers: list[tuple[int, str, Any]] = []
        self.failures: list[str] = []
        self._url, self._name, self._stop = url, name, threading.Event()
        asks = (self._generate, self._generate_stream, self._chat_stream, self._message)
        self._threads = [
            threading.Thread(target=self._run, args=(number, asks[number % len(asks)])) for number in range(num_clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def await_version(self, version: str) -> None:
        """Until there are answers of this version to prompts and to chats, and each client may have had one."""

        def is_answered() -> bool:
            seen = [index < len(PROMPTS) for index, found, _ in self.answers if found == version]
            return bool(self.failures) or (len(seen) >= len(self._threads) and len(set(seen)) == 2)

        until(is_answered, 60.0, f"answers of {version}")

    def _run(self, number: int, ask: Callable[[int], None]) -> None:
        while not self._stop.is_set():
            number += 1
            try:
                ask(number)
            except Exception as error:
                self.failures.append(repr(error))

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        answer = requests.post(f"{self._url}{path}", json={"model": self._name, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    def _generate(self, number: int, *, stream: bool = False) -> None:
        index = number % len(PROMPTS)
        adapter = {} if self._name == "tiny" else {"lora_path": self._name}
        body = {"input_ids": PROMPTS[index], "sampling_params": SAMPLING, "stream": stream, **adapter}
        answer = self._post("/generate", body)
        made = _events(answer) if stream else [answer.json()]
        (version,) = {answer.headers["x-weight-version"], *(one["meta_info"]["weight_version"] for one in made)}
        self.answers.append((index, version, made[-1]["output_ids"]))

    def _generate_stream(self, number: int) -> None:
        self._generate(number, stream=True)

    def _chat_stream(self, number: int) -> None:
        index = number % len(CHATS)
        answer = self._post("/v1/chat/completions", {"messages": CHATS[index], **CHAT_SAMPLING, "stream": True})
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in _events(answer) if event["choices"]]
        self.answers.append((len(PROMPTS) + index, answer.headers["x-weight-version"], _whole("".join(pieces))))

    def _message(self, number: int) -> None:
        index = number % len(CHATS)
        answer = self._post("/v1/messages", {"messages": CHATS[index], **CHAT_SAMPLING})
        text = "".join(block["text"] for block in answer.json()["content"])
        self.answers.append((len(PROMPTS) + index, answer.headers["x-weight-version"], _whole(text)))


def _whole(text: str) -> str:
    """`text` without a character at its end that has not all of its bytes: servers leave it out."""
    return text.rstrip("\ufffd")


def _events(answer: requests.Response) -> list[Any]:
    """The events of a stream that has ended well."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    events = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in event for event in events), events[-1]
    return events


def update(url: str, path: Path, version: str, **fields: Any) -> requests.Response:
    body = {"model_path": str(path), "weight_version": version, **fields}
    return requests.post(f"{url}/update_weights_from_disk", json=body, timeout=240)


def check(models: Models, answers: Sequence[tuple[int, str, Any]], first: str) -> set[str]:
    """Every answer is that of its version's model; returns the versions."""
    for index, version, output in answers:
        model = 0 if version == first else int(version.partition("-")[2])
        assert output == models.outputs[model][index], (index, version)
    return {version for _, version, _ in answers}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("weights"))


def run_updates(models: Models, url: str, change: Callable[[Path, str], None], *, num_clients: int = 4) -> set[str]:
    """Change to the other weights and back under load, and once to a model that does not fit."""
    with Load(url, num_clients, models.name) as load:
        load.await_version("first")
        for step, number in enumerate((1, 0, 1)):
            change(models.paths[number], f"v{step}-{number}")
            load.await_version(f"v{step}-{number}")
    assert not load.failures, load.failures[0]
    return check(models, load.answers, "first")


STORE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "memory"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16, "prefetch_timeout_base": 1.0}'),
    *("--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:0"}'),
)
SPLITS = {
    "tp": ("--tp-size", "2"),
    "pp": ("--pp-size", "2"),
    "dp": ("--dp-size", "2"),
    "store": STORE,
    "store-tp": (*STORE[:-2], "--tp-size", "2"),
}


@pytest.mark.parametrize("flags", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in SPLITS)])
def test_a_monolith_changes_its_weights_under_load(models: Models, flags: str) -> None:
    """Split over ranks, with replicas, and with a store: the pages of each version have keys of their own."""
    more = SPLITS.get(flags, ())
    with running_monolith(str(models.paths[0]), *FLAGS, *more, "--weight-version", "first") as server:

        def change(path: Path, version: str) -> None:
            answer = update(server.url, path, version)
            assert answer.status_code == 200 and answer.json()["weight_version"] == version, answer.text
            info = requests.get(f"{server.url}/get_model_info", timeout=60).json()
            assert (info["weight_version"], info["model_path"]) == (version, str(path))

        assert len(run_updates(models, server.url, change)) == 4
        assert_idle(server)


TWO = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
FOUR = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
MOVING = ("--ep-num-redundant-experts", "2", "--enable-eplb", "--eplb-rebalance-num-iterations", "4")
EXPERTS = {
    "ep": ("--tp-size", "2", "--ep-size", "2"),
    "eplb": ("--tp-size", "2", "--ep-size", "2", *MOVING),
    "dp attention": TWO,
    "dp attention, experts move": (*TWO, "--ep-size", "2", *MOVING, "--no-disable-overlap-schedule"),
    "dp attention of four ranks, experts move": (*FOUR, "--ep-size", "4", *MOVING),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", EXPERTS)
def test_experts_change_while_they_move(flags: str, tmp_path: Path) -> None:
    models = Models(tmp_path, "qwen3_moe")
    with running_monolith(str(models.paths[0]), *FLAGS, *EXPERTS[flags], "--weight-version", "first") as server:

        def change(path: Path, version: str) -> None:
            answer = update(server.url, path, version)
            assert answer.status_code == 200 and answer.json()["weight_version"] == version, answer.text

        assert len(run_updates(models, server.url, change)) == 4
        if "--enable-eplb" in EXPERTS[flags]:
            facts = server.state()["internal_states"][0]["facts"]
            assert facts["expert_rebalances"] > 1 and facts["experts_moved"] > 0
        assert_idle(server)


@pytest.mark.slow
def test_a_pair_with_adapters_changes_its_weights_under_load(tmp_path: Path) -> None:
    """The adapter stays loaded, and each answer is that of one version with the adapter."""
    models = Models(tmp_path, has_adapter=True)
    lora = ("--enable-lora", "--lora-paths", f"adapter={models.adapter}", "--weight-version", "first")
    with running_pair(str(models.paths[0]), *FLAGS, *lora, prefill_flags=("--tp-size", "2")) as pair:

        def change(path: Path, version: str) -> None:
            answer = update(pair.url, path, version)
            assert answer.status_code == 200, answer.text

        assert len(run_updates(models, pair.url, change)) == 4
        assert_idle(*pair.workers)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(), TWO], ids=["", "dp attention"])
@pytest.mark.parametrize("how", ["through the router", "by hand"])
def test_a_pair_changes_its_weights_under_load(models: Models, how: str, split: tuple[str, ...]) -> None:
    """The clients notice nothing: the router asks again while the two servers differ."""
    with running_pair(str(models.paths[0]), *FLAGS, *split, "--weight-version", "first") as pair:

        def change(path: Path, version: str) -> None:
            for server in [pair.router] if how == "through the router" else pair.workers:
                answer = update(server.url, path, version)
                assert answer.status_code == 200, answer.text
            for server in pair.workers:
                info = requests.get(f"{server.url}/get_model_info", timeout=60).json()
                assert (info["weight_version"], info["model_path"]) == (version, str(path))

        assert len(run_updates(models, pair.url, change)) == 4
        answer = update(pair.url, models.paths[0].parent / "nowhere", "v")
        assert answer.status_code == 400 and "there is no model at" in answer.text
        assert_idle(*pair.workers)
