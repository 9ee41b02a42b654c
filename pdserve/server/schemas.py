"""Request bodies as typed structs. A wrong type is refused by name; `Any` fields are checked where they are used."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""Higher runs first; the same for all prompts of a body."""

UNSUPPORTED_NATIVE = (
    "audio_data", "custom_logit_processor", "data_parallel_rank", "image_data", "input_embeds", "lora_path",
    "return_hidden_states", "return_routed_experts", "session_params", "token_ids_logprob", "video_data",
)  # fmt: skip
UNSUPPORTED_NATIVE_SAMPLING = ("custom_params", "ebnf", "json_schema", "regex", "stop_regex", "structural_tag")
UNSUPPORTED_OPENAI = (
    "custom_logit_processor", "data_parallel_rank", "ebnf", "input_embeds", "json_schema", "lora_path",
    "prompt_logprobs", "regex", "return_hidden_states", "session_params", "stop_regex", "structural_tag",
)  # fmt: skip
UNSUPPORTED_CHAT = (
    *UNSUPPORTED_OPENAI,
    "audio", "chat_template", "documents", "echo", "function_call", "functions", "modalities", "prediction",
    "reasoning_effort", "response_format", "tool_choice", "tools", "verbosity", "web_search_options",
)  # fmt: skip
UNSUPPORTED_COMPLETION = (*UNSUPPORTED_OPENAI, "best_of", "echo", "response_format", "suffix")


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` of `/generate`, with SGLang's names. None: the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None


class GenerateBody(msgspec.Struct):
    """`POST /generate`."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    stream: bool | None = None
    return_logprob: Any = None
    top_logprobs_num: Any = None
    logprob_start_len: Any = None
    return_text_in_logprobs: bool | None = None
    rid: Any = None
    priority: Priority | None = None
    model: str | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


class StreamOptions(msgspec.Struct):
    """`stream_options` of the OpenAI endpoints."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ConstraintFields(msgspec.Struct):
    """What constrains the answers of an OpenAI body: OpenAI's field, SGLang's, and vLLM's old and new ones."""

    response_format: Any = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


class OpenAIBody(ConstraintFields):
    """What chat and text completions share, extras of SGLang and vLLM among it."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    return_meta_info: bool | None = None
    rid: Any = None
    priority: Priority | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: Any = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct):
    """One piece of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(msgspec.Struct):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None
