"""`SamplingParams` of the offline API: vLLM's field names, validated on construction. Dicts may use SGLang's names.

The fields are validated by the code of `/v1/completions`, so that both refuse the same values with the same messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.llm.outputs import InvalidRequestError
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams as EngineSampling
from pdserve.protocol.sampling import Grammar
from pdserve.server.http.json_http import convert
from pdserve.server.request.constraints import Constraint, openai_constraint
from pdserve.server.request.intake import check_top_logprobs, openai_logprobs
from pdserve.server.request.sampling_fields import (
    COMPLETION_TOKENS,
    RequestLimits,
    count_n,
    openai_sampling,
)
from pdserve.server.request.schemas import CompletionBody
from pdserve.server.text.stop_regex import compile_own

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Field names that dicts may use instead: SGLang's name to vLLM's name."""
_ENDLESS = 1 << 40
_ANY_MODEL = RequestLimits("null", vocab_size=1 << 31, context_length=_ENDLESS, max_total_tokens=_ENDLESS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of a request. The names and defaults are vLLM's.

    `max_tokens` None: as many tokens as fit into the context. `top_k` 0 or -1: the whole vocabulary. `logprobs`: number
    of most likely tokens to return beside each sampled token; 0: the sampled token only; None: no log probabilities.
    `prompt_logprobs`: the same for prompt tokens. `seed` None: derived from the LLM's seed, if it has one.
    `speculative` False: no speculative decoding for this request. `custom_params`: `thinking_budget`, the most tokens
    of reasoning, and the parameters of `custom_logit_processor`, the name of one of the LLM's `logit_processors`.
    At most one of these fields constrains the output: `structured_outputs` (a dict with `json`, `regex`, `choice`,
    `grammar`, `json_object` or `structural_tag`), `response_format`, `json_schema`, `regex`, `ebnf` and
    `structural_tag`.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `field` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = COMPLETION_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    custom_params: Mapping[str, Any] | None = None
    custom_logit_processor: str | None = None
    speculative: bool = True

    def __post_init__(self) -> None:
        """Refuse values that are invalid for every model; see `Raises` of the class."""
        try:
            count_n(self._body.n)
            self.logprob_params()
            self.constraint()
            self.for_engine(1, _ANY_MODEL, "prompt", None)
            compile_own(self._body.stop_regex)
        except RequestError as error:
            raise InvalidRequestError.of(error) from None

    @classmethod
    def of(cls, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Convert `given`: a dict with vLLM's or SGLang's names, or None for the defaults.

        Raises:
            InvalidRequestError: a field is unknown, given twice, or invalid.
        """
        if isinstance(given, SamplingParams):
            return given
        if given is not None and not isinstance(given, Mapping):
            message = f"sampling_params must be SamplingParams or a dict, got {type(given).__name__}"
            raise InvalidRequestError(message, field="sampling_params")
        known = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            ours = OTHER_NAMES.get(name, name)
            if ours not in known:
                raise InvalidRequestError(f"sampling_params has no field {name!r}", field=str(name))
            if ours in values:
                raise InvalidRequestError(f"{name} and {ours} are the same field; give one", field=name)
            values[ours] = value
        return cls(**values)

    def logprob_params(self) -> Logprobs | None:
        """Build the log probability parameters; None: no log probabilities.

        Raises:
            RequestError: `logprobs` or `prompt_logprobs` is out of range.
        """
        body = self._body
        top = check_top_logprobs(body.logprobs, "logprobs")
        return openai_logprobs(top, check_top_logprobs(body.prompt_logprobs, "prompt_logprobs"))

    def constraint(self) -> Constraint | None:
        """Return the grammar constraint, not yet compiled; None: the output is not constrained.

        Raises:
            RequestError: a field has the wrong type, or two fields constrain the output.
        """
        return openai_constraint(self._body)

    def for_engine(
        self, num_prompt: int, limits: RequestLimits, prompt_field: str, grammar: Grammar | None
    ) -> EngineSampling:
        """Convert to the scheduler's parameters, for a prompt of `num_prompt` tokens.

        Raises:
            RequestError: the parameters do not fit this model or this prompt.
        """
        return openai_sampling(self._body, _ENDLESS, num_prompt, limits, prompt_field, grammar)

    @functools.cached_property
    def _body(self) -> CompletionBody:
        """The parameters as a body of `/v1/completions`. Raises RequestError for a wrong type."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["no_stop_trim"] = values.pop("include_stop_str_in_output")
        if self.top_k == 0:
            values["top_k"] = -1
        if isinstance(self.logit_bias, Mapping):
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return convert({name: _plain(value) for name, value in values.items()}, CompletionBody)


def _plain(value: Any) -> Any:
    """Convert mappings, tuples and sets to dicts and lists, as in JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple | set | frozenset) else value
