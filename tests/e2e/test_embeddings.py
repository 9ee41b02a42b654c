"""Embeddings and hidden states of real servers: those of transformers, on one and on several ranks, and of a pair."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import requests
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from pdserve import LLM, InvalidRequestError, PoolingParams
from pdserve.server.pooling_api import scoring
from tests.e2e.harness import Server, assert_idle, running, running_monolith, running_pair
from tests.reference import load_reference
from tests.tiny import VOCAB_SIZE, make_tiny

FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "32", "--max-total-tokens", "4096")
TEXTS = ["What is the capital of France?", "a", *("The quick brown fox jumps over it, " * count for count in (3, 9))]
STATES = (*FLAGS, "--enable-return-hidden-states")

Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as sentence-transformers saves it: the base model alone, and how it pools."""
    path = make_tiny("qwen3", tmp_path_factory.mktemp("embedding"))
    tensors = load_file(path / "model.safetensors")
    own = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(own, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"st.{kind}"} for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return path


def _expected(path: Path, *, mean: bool = False) -> Vectors:
    """By transformers: the normalised state of the last token of each text, or the mean of its states."""
    model, tokenizer, vectors = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path), []
    for text in TEXTS:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        vector = states.mean(0) if mean else states[-1]
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


def _vectors(server: Server, **fields: Any) -> Vectors:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="m", input=TEXTS, **fields)
    return np.array([one.embedding for one in answer.data], dtype=np.float32)


@pytest.mark.slow
def test_vectors_of_transformers(checkpoint: Path) -> None:
    with running_monolith(str(checkpoint), "--is-embedding", *FLAGS) as server:
        expected = _expected(checkpoint)
        np.testing.assert_allclose(_vectors(server), expected, atol=1e-4)
        short = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
        np.testing.assert_allclose(_vectors(server, dimensions=5, encoding_format="float"), short, atol=1e-4)
        with ThreadPoolExecutor(max_workers=4) as pool:
            together = list(pool.map(lambda _: _vectors(server), range(4)))
        for vectors in together:
            np.testing.assert_allclose(vectors, expected, atol=1e-4)
        refused = requests.post(f"{server.url}/generate", json={"text": "a"}, timeout=30)
        assert refused.status_code == 400 and "--is-embedding" in refused.text
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--tp-size", "2"),
        ("--pp-size", "2"),
        ("--tp-size", "2", "--embedding-pooling", "mean"),
        ("--pp-size", "2", "--embedding-pooling", "mean"),
        ("--dp-size", "2"),
        ("--disable-overlap-schedule",),
    ],
    ids=" ".join,
)
def test_several_ranks(flags: tuple[str, ...], checkpoint: Path) -> None:
    with running_monolith(str(checkpoint), "--is-embedding", *FLAGS, *flags) as server:
        np.testing.assert_allclose(_vectors(server), _expected(checkpoint, mean="mean" in flags), atol=1e-4)
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"runner": "pooling"}, {"is_embedding": True, "tp_size": 2}], ids=str)
def test_the_python_api_gives_the_same_vectors_and_scores(flags: dict[str, Any], checkpoint: Path) -> None:
    expected, quiet = _expected(checkpoint), {"use_tqdm": False}
    small: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": 32, "max_total_tokens": 4096, "device": "cpu"}
    with LLM(str(checkpoint), **small, **flags) as llm:
        outputs = llm.embed(TEXTS, **quiet)
        np.testing.assert_allclose([one.outputs.embedding for one in outputs], expected, atol=1e-4)
        assert [one.prompt for one in outputs] == TEXTS and outputs[0].outputs.hidden_size == expected.shape[1]
        ids = llm.get_tokenizer()(TEXTS[2])["input_ids"]
        (short,) = llm.embed(ids, pooling_params=PoolingParams(dimensions=5), **quiet)
        assert short.prompt is None and short.prompt_token_ids == ids
        wanted = expected[2, :5] / np.linalg.norm(expected[2, :5])
        np.testing.assert_allclose(short.outputs.embedding, wanted, atol=1e-4)
        (raw,) = llm.embed(TEXTS[2], pooling_params={"normalize": False}, **quiet)
        assert abs(np.linalg.norm(raw.outputs.embedding) - 1) > 1e-3
        scores = llm.score(TEXTS[0], TEXTS[1:], **quiet)
        np.testing.assert_allclose([one.outputs.score for one in scores], expected[1:] @ expected[0], atol=1e-4)
        for call, field in (
            (lambda: llm.generate("a", **quiet), None),
            (lambda: llm.embed("a", pooling_params={"dimensions": 1000}, **quiet), "dimensions"),
            (lambda: llm.embed([1 << 30], **quiet), "prompts"),
            (lambda: llm.embed("word " * 5000, **quiet), "prompts"),
            (lambda: llm.embed("a", lora_path="x", **quiet), "lora_path"),
            (lambda: llm.score(["a", "b"], ["c"], **quiet), "data_1"),
            (lambda: llm.score("a", "b", instruct="c", **quiet), "instruct"),
            (lambda: llm.score(["a", "b"], ["c", "word " * 5000], **quiet), "data_2[1]"),
            (lambda: llm.score("\ud800", ["c"], **quiet), "data_1"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert field is None or caught.value.field == field


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_the_python_api_scores_with_a_reranker(language_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "device": "cpu"}
    with LLM(str(language_model), **small) as llm:
        with pytest.raises(InvalidRequestError, match="is_embedding=True"):
            llm.embed("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="ranks no texts"):
            llm.score("a", "b", use_tqdm=False)
    with LLM(str(language_model), chat_template="qwen3_reranker", **small) as llm:
        with pytest.raises(InvalidRequestError, match="'yes' is not one token"):
            llm.score("a", "b", use_tqdm=False)
        labels = {"yes": 40, "no": 50}

        async def only_token(_: object, text: str) -> int:
            return labels[text]

        monkeypatch.setattr(scoring, "_only_token", only_token)
        outputs = llm.score(["a", "b"], ["c", "d"], instruct="Judge.", use_tqdm=False)
    loaded = load_reference(language_model)
    for output in outputs:
        with torch.no_grad():
            logits = loaded(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        expected = logits[list(labels.values())].softmax(-1)[0]
        np.testing.assert_allclose(output.outputs.score, expected.numpy(), atol=1e-4)


def _states(path: Path, answer: dict[str, Any], prompt: list[int]) -> None:
    """Check the hidden states of an answer against those of transformers."""
    output, found = answer["output_ids"], answer["meta_info"]["hidden_states"]
    with torch.no_grad():
        expected = load_reference(path).model(torch.tensor([[*prompt, *output[:-1]]])).last_hidden_state[0].numpy()
    assert len(found) == len(output)
    np.testing.assert_allclose(np.array(found[0]), expected[: len(prompt)], atol=1e-3)
    np.testing.assert_allclose(np.array(found[1:]), expected[len(prompt) :], atol=1e-3)


def _body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_hidden_states": True, **fields}


@pytest.mark.slow
def test_hidden_states_of_a_pair(language_model: Path) -> None:
    prompt = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(70)]
    with running_pair(str(language_model), *STATES) as pair:
        for _ in range(2):  # the second prompt is cached
            _states(language_model, pair.generate(**_body(prompt)), prompt)
        for fields in ({"stream": True}, {"input_ids": [prompt]}):
            refused = requests.post(f"{pair.url}/generate", json=_body(prompt, **fields), timeout=60)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_hidden_states")
        assert_idle(*pair.workers)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--tp-size", "2"), ("--pp-size", "2")], ids=["one rank", "tp 2", "pp 2"])
def test_hidden_states_of_a_monolith(flags: tuple[str, ...], language_model: Path) -> None:
    prompt = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(70)]
    draft = ("--speculative-algorithm", "NGRAM") if not flags else ()
    with running_monolith(str(language_model), *STATES, *flags, *draft) as server:
        for _ in range(2):
            answer = requests.post(f"{server.url}/generate", json=_body(prompt), timeout=60).json()
            _states(language_model, answer, prompt)
        events = requests.post(f"{server.url}/generate", json=_body(prompt, stream=True), timeout=60)
        last = json.loads([line for line in events.text.split("\n\n") if line][-2].removeprefix("data: "))
        _states(language_model, last, prompt)
        both = requests.post(
            f"{server.url}/generate",
            json=_body(prompt, input_ids=[prompt, prompt[:9]], return_hidden_states=[False, True]),
            timeout=60,
        ).json()
        assert "hidden_states" not in both[0]["meta_info"]
        _states(language_model, both[1], prompt[:9])
        assert_idle(server)


@pytest.mark.slow
def test_input_embeddings(language_model: Path) -> None:
    """Through a pair and two tensor ranks: the tokens of the same prompt as token ids."""
    prompt = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(50)]
    embeds = load_reference(language_model).model.embed_tokens.weight.detach()[prompt].tolist()
    body = {"sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}

    def outputs(url: str) -> list[list[int]]:
        bodies = ({"input_ids": prompt}, {"input_embeds": embeds}, {"input_embeds": embeds})
        answers = [requests.post(f"{url}/generate", json=body | own, timeout=120) for own in bodies]
        assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
        assert answers[2].json()["meta_info"]["cached_tokens"] == 48, "equal embeddings share cached KV"
        return [answer.json()["output_ids"] for answer in answers]

    with running_pair(str(language_model), *FLAGS) as pair:
        expected, *found = outputs(pair.url)
        assert found == [expected] * 2
        assert_idle(*pair.workers)
    for flags in (("--tp-size", "2"), ("--pp-size", "2")):
        with running_monolith(str(language_model), *FLAGS, *flags) as server:
            assert outputs(server.url) == [expected] * 3
            assert_idle(server)


@pytest.mark.slow
def test_scores_of_labels(language_model: Path) -> None:
    items, labels = [[9, 10, 11], [12]], [5, 300, 7]
    with running_monolith(str(language_model), *FLAGS) as server:
        body = {"query": [3, 4, 8], "items": items, "label_token_ids": labels}
        answer = requests.post(f"{server.url}/v1/score", json=body, timeout=60).json()
        loaded = load_reference(language_model)
        for item, scores in zip(items, answer["scores"], strict=True):
            with torch.no_grad():
                expected = loaded(torch.tensor([[3, 4, 8, *item]])).logits[0, -1].softmax(-1)[labels]
            np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
        ranked = requests.post(f"{server.url}/v1/rerank", json={"query": "a", "documents": ["b"]}, timeout=60)
        assert ranked.status_code == 400 and "qwen3_reranker" in ranked.text
        assert_idle(server)


@pytest.mark.slow
def test_ranks_through_a_router(checkpoint: Path) -> None:
    with running_monolith(str(checkpoint), "--is-embedding", *FLAGS) as server:
        router = Server("router", "pdserve.launch_router", ["--port", "0", "--worker-urls", server.url])
        with running(router):
            np.testing.assert_allclose(_vectors(router), vectors := _expected(checkpoint), atol=1e-4)
            body = {"query": TEXTS[0], "documents": TEXTS}
            results = requests.post(f"{router.url}/v1/rerank", json=body, timeout=60).json()["results"]
        assert results[0]["index"] == 0 and results[0]["document"] == {"text": TEXTS[0]}
        found = {result["index"]: result["relevance_score"] for result in results}
        np.testing.assert_allclose([found[i] for i in range(len(TEXTS))], vectors @ vectors[0], atol=1e-4)
