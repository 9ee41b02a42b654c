"""Vectors and scores of texts by an `LLM`: `embed` and `score`, with vLLM's names.

The prompts are pooled by the code of `/v1/embeddings` and `/v1/score`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pdserve.errors import PdserveError, RequestError
from pdserve.llm.outputs import (
    BatchError,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    InvalidRequestError,
    ScoringOutput,
    ScoringRequestOutput,
)
from pdserve.llm.prepare import Adapter, GivenPrompt, Preparer, Prompt, ReadyPrompt, adapters_of, as_prompts
from pdserve.llm.progress import UseTqdm, run_jobs
from pdserve.llm.runner import Job, OfflineRunner
from pdserve.llm.servers import Servers
from pdserve.protocol.hidden_states import Pooling
from pdserve.server.generation import GenerationUpdate
from pdserve.server.pooling_api.pooling import check_computed, pool, pooled_request
from pdserve.server.pooling_api.scoring import label_request, reranker_prompts, softmax


@dataclasses.dataclass(frozen=True)
class PoolingParams:
    """How `embed` makes a vector. vLLM's names.

    `dimensions`: leading numbers of the vector; None: all. `normalize`: to length 1; None: as the checkpoint says.
    """

    dimensions: int | None = None
    normalize: bool | None = None

    @classmethod
    def of(cls, given: PoolingParams | Mapping[str, Any] | None) -> PoolingParams:
        """Convert an argument. Raises InvalidRequestError naming `pooling_params`, or the field."""
        if isinstance(given, Mapping):
            unknown = given.keys() - {field.name for field in dataclasses.fields(cls)}
            if unknown:
                raise _wrong(f"pooling_params has no {min(map(str, unknown))}")
            given = cls(**given)
        params = cls() if given is None else given
        if not isinstance(params, PoolingParams):
            raise _wrong(f"pooling_params must be PoolingParams or a dict, got {type(given).__name__}")
        if params.dimensions is not None and type(params.dimensions) is not int:
            raise InvalidRequestError(f"dimensions must be an integer, got {params.dimensions!r}", field="dimensions")
        if params.normalize is not None and type(params.normalize) is not bool:
            raise InvalidRequestError(f"normalize must be a bool, got {params.normalize!r}", field="normalize")
        return params


class EmbeddingCalls:
    """The methods of `LLM` about vectors and scores. Thread-safe."""

    _servers: Servers
    _preparer: Preparer
    _runner: OfflineRunner
    _check_alive: Callable[[], None]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm = True,
        lora_path: Adapter | Sequence[Adapter] = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each of one or several prompts, in their order. Needs `LLM(..., is_embedding=True)`.

        The vectors are float32 numbers, `hidden_size` of them unless `pooling_params` has `dimensions`. Prompts,
        `use_tqdm`, `lora_path` and errors are those of `generate`.

        Raises:
            InvalidRequestError: an argument is invalid, or this LLM generates text.
            BatchError: requests failed; raised after all requests have ended, with the other outputs.
            EngineDeadError: the LLM was shut down, or a server died before the call.
        """
        given, params = as_prompts(prompts), PoolingParams.of(pooling_params)
        return self._embed(given, params, use_tqdm, adapters_of(lora_path, len(given)))

    def _embed(
        self, given: Sequence[GivenPrompt], params: PoolingParams, use_tqdm: UseTqdm, adapters: Sequence[Adapter]
    ) -> list[EmbeddingRequestOutput]:
        self._check_alive()
        pooling = self._pooling
        if pooling is None:
            raise InvalidRequestError("embed: this LLM generates text; make it with is_embedding=True")
        size = self._preparer.context.client.require_ready().hidden_size
        if params.dimensions is not None and not 1 <= params.dimensions <= size:
            message = f"dimensions must be in [1, {size}], got {params.dimensions}"
            raise InvalidRequestError(message, field="dimensions")
        if params.normalize is not None:
            pooling = Pooling(mode=pooling.mode, normalize=params.normalize)
        ready = self._servers.loop.call(self._preparer.prompts(given))

        def output(job: Job, updates: list[GenerationUpdate]) -> EmbeddingRequestOutput:
            (update,) = updates
            check_computed(update)
            return EmbeddingRequestOutput(
                request_id=job.request_id,
                prompt=ready[job.number].text,
                prompt_token_ids=ready[job.number].input_ids,
                outputs=EmbeddingOutput(pool(update.hidden_parts, pooling, params.dimensions).tolist()),
                num_cached_tokens=update.cached_tokens,
            )

        requests = [pooled_request(one.input_ids, pooling) for one in ready]
        jobs = self._servers.loop.call(self._preparer.prompt_jobs(ready, requests, adapters))
        return run_jobs(self._servers, self._runner, jobs, output, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruct: str | None = None,
        use_tqdm: UseTqdm = True,
        lora_path: Adapter = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2` fits to that of `data_1`, in order; one text of `data_1` is for all.

        With `is_embedding` a score is the cosine of two vectors. With a reranker (a model whose chat template has the
        roles query and document) it is the probability of "yes" against "no"; `instruct` is for its template.

        Raises:
            InvalidRequestError: an argument is invalid, or the model gives no such scores.
            BatchError: requests failed; raised after all requests have ended, with the other scores.
            EngineDeadError: the LLM was shut down, or a server died before the call.
        """
        first, second = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        if len(first) not in (1, len(second)):
            message = f"data_1 has {len(first)} texts and data_2 {len(second)}; it must have one, or as many"
            raise InvalidRequestError(message, field="data_1")
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        self._check_alive()
        if self._pooling is None:
            return self._judged(pairs, instruct, use_tqdm, lora_path)
        if instruct is not None:
            message = "instruct is for rerankers; put it into the text of an embedding model"
            raise InvalidRequestError(message, field="instruct")
        places: dict[str, str] = {}
        for text, where in (*_places(data_1, "data_1"), *_places(data_2, "data_2")):
            places.setdefault(text, where)
        return self._cosines(pairs, places, use_tqdm, lora_path)

    def _cosines(
        self, pairs: Sequence[tuple[str, str]], places: Mapping[str, str], use_tqdm: UseTqdm, lora_path: Adapter
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of each pair of texts. `places` has each text once, with its name in error messages."""
        given = [GivenPrompt(where, text) for text, where in places.items()]
        outputs: Sequence[EmbeddingRequestOutput | None]
        failed: Mapping[int, PdserveError] = {}
        try:
            outputs = self._embed(given, PoolingParams(normalize=True), use_tqdm, adapters_of(lora_path, len(given)))
        except BatchError as error:
            outputs, failed = error.outputs, error.errors
        numbers = {text: number for number, text in enumerate(places)}
        scores: list[ScoringRequestOutput | None] = []
        errors: dict[int, PdserveError] = {}
        for index, (first, second) in enumerate(pairs):
            one, other = outputs[numbers[first]], outputs[numbers[second]]
            if one is None or other is None:
                errors[index] = failed[numbers[first if one is None else second]]
                scores.append(None)
            else:
                scores.append(_cosine(one, other))
        if errors:
            raise BatchError(scores, errors)
        return [score for score in scores if score is not None]

    @property
    def _pooling(self) -> Pooling | None:
        return self._preparer.context.client.require_ready().pooling

    def _judged(
        self, pairs: list[tuple[str, str]], instruct: str | None, use_tqdm: UseTqdm, lora_path: Adapter
    ) -> list[ScoringRequestOutput]:
        """Return the scores of a reranker."""
        loop = self._servers.loop
        try:
            lists, labels = loop.call(reranker_prompts(self._preparer.context, pairs, "data_2", instruct))
        except RequestError as error:
            raise InvalidRequestError.of(error) from None

        def output(job: Job, updates: list[GenerationUpdate]) -> ScoringRequestOutput:
            (update,) = updates
            check_computed(update)
            return ScoringRequestOutput(
                request_id=job.request_id,
                prompt_token_ids=lists[job.number],
                outputs=ScoringOutput(softmax(update.logprobs[0].picked)[0]),
                num_cached_tokens=update.cached_tokens,
            )

        prompts = [ReadyPrompt(f"data_2[{number}]", None, ids) for number, ids in enumerate(lists)]
        requests = [label_request(ids, labels) for ids in lists]
        jobs = loop.call(self._preparer.prompt_jobs(prompts, requests, adapters_of(lora_path, len(prompts))))
        return run_jobs(self._servers, self._runner, jobs, output, use_tqdm)


def _texts(given: Any, field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequestError(f"{field} must be a text, or a list of texts, none of them empty", field=field)
    return list(texts)


def _places(given: str | Sequence[str], field: str) -> list[tuple[str, str]]:
    """Return each text of an argument with its name in error messages."""
    return [(given, field)] if isinstance(given, str) else [(text, f"{field}[{i}]") for i, text in enumerate(given)]


def _cosine(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Return the score of two texts from their vectors, whose length is 1."""
    first, second = (np.array(output.outputs.embedding, dtype=np.float32) for output in (one, other))
    return ScoringRequestOutput(
        request_id=f"{one.request_id}-{other.request_id}",
        prompt_token_ids=[*one.prompt_token_ids, *other.prompt_token_ids],
        outputs=ScoringOutput(float(first @ second)),
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
    )


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="pooling_params")
