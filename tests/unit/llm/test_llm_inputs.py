"""Sampling parameters and prompts of the offline API: what is taken, and what is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.errors import EngineDeadError
from pdserve.llm.api import one_each
from pdserve.llm.embedding import EmbeddingCalls, PoolingParams
from pdserve.llm.outputs import (
    BatchError,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    InvalidRequestError,
    OutputMaker,
)
from pdserve.llm.prepare import GivenPrompt, as_conversations, as_prompts
from pdserve.llm.sampling import SamplingParams
from pdserve.protocol.hidden_states import Pooling
from pdserve.protocol.messages import GenerateRequest, SpeculationStats
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.generation import GenerationUpdate
from pdserve.server.request.sampling_fields import RequestLimits

LIMITS = RequestLimits("null", vocab_size=100, context_length=64, max_total_tokens=1000)


def test_sampling_params_reach_the_engine() -> None:
    params = SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop="x", stop_token_ids=(7,),
        seed=9, ignore_eos=True, include_stop_str_in_output=True, logit_bias={3: -1}, presence_penalty=1,
        skip_special_tokens=False, speculative=False,
    )  # fmt: skip
    made = params.for_engine(10, LIMITS, "prompts", None)
    assert (made.max_new_tokens, made.min_new_tokens, made.temperature, made.top_p, made.top_k) == (5, 2, 0.5, 0.9, 3)
    assert (made.min_p, made.stop, made.stop_token_ids, made.seed) == (0.1, ("x",), (7,), 9)
    assert made.ignore_eos and made.no_stop_trim and not made.skip_special_tokens
    assert (made.logit_bias, made.presence_penalty, made.speculative) == ({3: -1.0}, 1.0, False)


def test_defaults_are_vllms() -> None:
    made = SamplingParams().for_engine(10, LIMITS, "prompts", None)
    assert made == CoreSamplingParams(max_new_tokens=16)
    assert SamplingParams(max_tokens=None).for_engine(10, LIMITS, "prompts", None).max_new_tokens == 54
    assert SamplingParams().logprob_params() is None
    logprob_params = SamplingParams(logprobs=0, prompt_logprobs=3).logprob_params()
    assert logprob_params is not None
    assert (logprob_params.output, logprob_params.top, logprob_params.prompt_from, logprob_params.to_decode) == (
        True,
        3,
        0,
        True,
    )


def test_dicts_take_the_names_of_sglang_too() -> None:
    given = {"max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 4, "no_stop_trim": True, "json_schema": "{}"}
    expected = SamplingParams(max_tokens=3, min_tokens=1, seed=4, include_stop_str_in_output=True, json_schema="{}")
    assert SamplingParams.of(given) == expected
    assert SamplingParams.of(None) == SamplingParams()
    assert one_each([given, SamplingParams(n=2)], 2) == [expected, SamplingParams(n=2)]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 99}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml"),
        ({"best": 1}, "best"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens"),
    ],
)
def test_a_wrong_value_is_a_value_error_that_names_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.of(given)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == field


def test_prompts_are_text_or_token_ids_one_or_many() -> None:
    assert as_prompts("a") == [GivenPrompt("prompts", "a")]
    assert as_prompts([3, 4]) == [GivenPrompt("prompts", [3, 4])]
    assert as_prompts({"prompt_token_ids": [3]}) == [GivenPrompt("prompts", [3])]
    mixed = as_prompts(["a", [3], {"prompt": "b"}, {"prompt_token_ids": (4, 5)}])
    assert [prompt.content for prompt in mixed] == ["a", [3], "b", [4, 5]]
    assert mixed[2].where == "prompts[2]"
    assert as_prompts([]) == []
    assert as_prompts({"prompt": "b", "cache_salt": "s"}) == [GivenPrompt("prompts", "b", "s")]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        [""],
        [[]],
        5,
        [5, "a"],
        {"prompt": [1]},
        {"prompt": "a", "x": 1},
        {"prompt_token_ids": []},
        [True],
        {"cache_salt": "s"},
    ]
    + [{"prompt": "a", "cache_salt": salt} for salt in ("", 5, "a\0", "a" * 1025)],
)
def test_other_prompts_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_prompts(wrong)
    assert caught.value.field == "prompts"


def test_conversations_one_or_many() -> None:
    message = {"role": "user", "content": "Hi"}
    assert as_conversations([message]) == [[message]]
    assert as_conversations([[message], [message, message]]) == [[message], [message, message]]
    for wrong in ([], "Hi", [[]], [message, [message]], [5]):
        with pytest.raises(InvalidRequestError) as caught:
            as_conversations(wrong)  # type: ignore[arg-type]
        assert caught.value.field == "messages"


def test_an_output_has_what_was_drafted_and_accepted() -> None:
    stats = SpeculationStats(num_verify_steps=2, num_draft_tokens=6, accepted_by_position=(2, 1))
    request = GenerateRequest(rid="r", input_ids=[5, 6], sampling=CoreSamplingParams())
    updates = [GenerationUpdate(0, text="ab", token_ids=[7, 8, 9, 10, 11], speculation=stats), GenerationUpdate(1)]
    output = OutputMaker(None, frozenset()).make("0", None, [request, request], updates, None, None)
    assert [answer.speculation for answer in output.outputs] == [stats, None]
    assert output.outputs[0].token_ids == [7, 8, 9, 10, 11]


def test_pooling_params_are_a_dict_or_an_object() -> None:
    assert PoolingParams.of(None) == PoolingParams() == PoolingParams.of({})
    assert PoolingParams.of({"dimensions": 3, "normalize": False}) == PoolingParams(3, normalize=False)
    wrong: list[tuple[Any, str]] = [
        ({"size": 3}, "pooling_params"), (5, "pooling_params"), ({"dimensions": "3"}, "dimensions"),
        (PoolingParams(dimensions=True), "dimensions"), ({"normalize": 1}, "normalize"),
    ]  # fmt: skip
    for given, field in wrong:
        with pytest.raises(InvalidRequestError) as refused:
            PoolingParams.of(given)
        assert refused.value.field == field


class Embedding(EmbeddingCalls):
    """Has vectors of two numbers; the text "broken" fails."""

    _pooling = Pooling(mode="last", normalize=True)  # type: ignore[assignment]

    def __init__(self) -> None:
        self._check_alive = lambda: None
        self.wheres: list[str] = []

    def _embed(self, given: Sequence[GivenPrompt], *rest: Any) -> list[EmbeddingRequestOutput]:
        self.wheres = [prompt.where for prompt in given]
        outputs = [
            EmbeddingRequestOutput(
                request_id=str(number), prompt=None, prompt_token_ids=[number],
                outputs=EmbeddingOutput([1.0, 0.0] if prompt.content == "a" else [0.6, 0.8]),
            )
            for number, prompt in enumerate(given)
        ]  # fmt: skip
        failed = [number for number, prompt in enumerate(given) if prompt.content == "broken"]
        if failed:
            kept = [None if number in failed else output for number, output in enumerate(outputs)]
            raise BatchError(kept, {number: EngineDeadError(f"text {number}") for number in failed})
        return outputs


def test_scores_and_their_errors_are_those_of_the_pairs() -> None:
    llm = Embedding()
    scores = llm.score(["a", "b", "a"], ["b", "c", "a"])
    assert [one.outputs.score for one in scores] == pytest.approx([0.6, 1.0, 1.0])
    assert llm.wheres == ["data_1[0]", "data_1[1]", "data_2[1]"], "each text once, by its first place"
    with pytest.raises(BatchError) as failed:
        llm.score("a", ["b", "broken", "a", "broken"])
    assert [None if one is None else one.request_id for one in failed.value.outputs] == ["0-1", None, "0-0", None]
    assert {index: str(error) for index, error in failed.value.errors.items()} == {1: "text 2", 3: "text 2"}


def test_as_many_parameters_as_prompts() -> None:
    with pytest.raises(InvalidRequestError, match="1 entries for 2 prompts"):
        one_each([{}], 2)
    with pytest.raises(InvalidRequestError, match="SamplingParams or a dict"):
        one_each("greedy", 2)  # type: ignore[arg-type]
