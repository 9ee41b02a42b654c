"""Request bodies as typed structs. A wrong type is an error that names the field; endpoints check `Any` fields.

Data only: `sampling_fields` and `constraints` convert the fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pdserve.config.schedule_group import MAX_PRIORITY, MIN_PRIORITY
from pdserve.protocol.sampling import BODY_FIELDS
from pdserve.server.generation import Resume
from pdserve.server.request.field_types import (
    Counts,
    DecodedIds,
    Flags,
    Hosts,
    InputEmbeds,
    JsonSchema,
    Names,
    PickedIds,
    Ports,
    Prompts,
    ResponseFormat,
    Rooms,
    SamplingFields,
    Starts,
    StructuralTag,
    Texts,
    TokenIds,
    ToolChoice,
)

MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGES = 4096
"""Maximum messages of a chat. A template takes some 80 us for each, and holds the GIL."""

Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
"""Scheduling priority: higher runs first, unless the server was started otherwise; it is that of all prompts of a body.
"""

UNSUPPORTED_NATIVE = ("audio_data", "image_data", "return_routed_experts", "video_data")
UNSUPPORTED_OPENAI = ("input_embeds", "lora_path", "return_hidden_states", "session_params")
UNSUPPORTED_CHAT = (
    *UNSUPPORTED_OPENAI,
    "audio", "echo", "function_call", "functions", "modalities", "prediction", "verbosity", "web_search_options",
)  # fmt: skip
UNSUPPORTED_COMPLETION = (*UNSUPPORTED_OPENAI, "suffix")


if TYPE_CHECKING:

    class DeclaredSampling(msgspec.Struct):
        """The fields of `BODY_FIELDS`, each nullable; null: the default. `declared_sampling` reads them."""

else:
    DeclaredSampling = msgspec.defstruct(
        "DeclaredSampling", [(name, kind | None, None) for name, kind in BODY_FIELDS.items()], module=__name__
    )


class SharedSampling(DeclaredSampling):
    """Sampling and stop fields that have the same name in native and OpenAI bodies. None: the default."""

    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stop_regex: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: JsonSchema = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: StructuralTag = None
    custom_params: dict[str, Any] | None = None


class NativeSampling(SharedSampling, forbid_unknown_fields=True):
    """`sampling_params` of `/generate`, with SGLang's names. None: the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateBody(msgspec.Struct):
    """`POST /generate`."""

    text: Texts = None
    input_ids: TokenIds = None
    input_embeds: InputEmbeds = None
    sampling_params: SamplingFields = None
    custom_logit_processor: Names = None
    stream: bool | None = None
    return_logprob: Flags = None
    top_logprobs_num: Counts = None
    logprob_start_len: Starts = None
    token_ids_logprob: PickedIds = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: Flags = None
    rid: Names = None
    session_params: dict[str, Any] | None = None
    priority: Priority | None = None
    data_parallel_rank: int | None = None
    model: str | None = None
    lora_path: Names = None
    cache_salt: Names = None
    extra_key: Names = None
    bootstrap_host: Hosts = None
    bootstrap_port: Ports = None
    bootstrap_room: Rooms = None
    pdserve_resume: Resume | None = None
    pdserve_single_request: bool | None = None
    """Whether decode sent the prefill half itself: no router merges the prompt's log probabilities into the answer."""


class StreamOptions(msgspec.Struct):
    """`stream_options` of the OpenAI endpoints."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ConstraintFields(SharedSampling):
    """Further constraint fields of an OpenAI body: OpenAI's field, and vLLM's old and new ones."""

    response_format: ResponseFormat = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


_UNCONSTRAINING = {*BODY_FIELDS, "n", "seed", "stop", "stop_token_ids", "stop_regex", "logit_bias", "custom_params"}
CONSTRAINTS = tuple(name for name in ConstraintFields.__struct_fields__ if name not in _UNCONSTRAINING)
"""Fields of a body that may constrain its output by a grammar."""


class OpenAIBody(ConstraintFields):
    """Fields shared by chat and text completions, with extensions of SGLang and vLLM."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    custom_logit_processor: str | None = None
    prompt_logprobs: int | None = None
    return_meta_info: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    rid: Names = None
    priority: Priority | None = None
    data_parallel_rank: int | None = None
    user: str | None = None
    cache_salt: Names = None
    extra_key: Names = None
    bootstrap_host: Hosts = None
    bootstrap_port: Ports = None
    bootstrap_room: Rooms = None
    pdserve_resume: Resume | None = None

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that every OpenAI body has, by name; not those of a subclass."""
        return {name: getattr(self, name) for name in OpenAIBody.__struct_fields__}


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: Prompts = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only `text` and `refusal` parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    """Function and arguments of a past tool call; `arguments` is JSON text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """A tool call of an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation. Some clients call `reasoning_content` `reasoning`."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionSpec(msgspec.Struct):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    """A tool that the model may use; only functions are supported."""

    type: str
    function: FunctionSpec | None = None


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: `prompt`, one or several texts, or `messages` and the other fields of a chat."""

    prompt: Texts = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`: token ids, or lists of them."""

    tokens: DecodedIds = None
    model: str | None = None
    skip_special_tokens: bool | None = None


class FunctionCallBody(msgspec.Struct):
    """`POST /parse_function_call`. `tool_call_parser` null: the server's own."""

    text: str
    tools: list[ToolSpec] | None = None
    tool_call_parser: str | None = None


class ReasoningBody(msgspec.Struct):
    """`POST /separate_reasoning`. `reasoning_parser` null: the server's own."""

    text: str
    reasoning_parser: str | None = None
    return_blocks: bool | None = None


class PauseBody(msgspec.Struct):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class PeerBody(msgspec.Struct):
    """`POST /declare_peer_dead`. `instance`: as in `/observe`."""

    instance: str


class MigrateBody(msgspec.Struct):
    """`POST /migrate`. `to`: base URL of the other server. `attach`: the caller opens the rest of the stream there."""

    rid: str | None = None
    to: str | None = None
    attach: bool = False


class ReplicateBody(msgspec.Struct):
    """`POST /replicate`. `to`: base URL of the other server; None: the answer only says how long the prefix is.

    The other fields are those of a request.
    """

    to: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class ProfileBody(msgspec.Struct):
    """`POST /start_profile`."""

    output_dir: str | None = None
    profile_id: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None


class LoadLoraBody(msgspec.Struct):
    """`POST /load_lora_adapter`: name of the adapter, and its directory on this server."""

    lora_name: str
    lora_path: str


class UnloadLoraBody(msgspec.Struct):
    """`POST /unload_lora_adapter`."""

    lora_name: str


class RoleSwitchBody(msgspec.Struct):
    """`POST /pd_role_switch`. `wait`: respond when the switch is complete; false: when it has started.

    `reload`: end the engine and start another one, instead of a change in place. `prepare_only` (SGLang): change
    nothing; there is nothing to prepare.
    """

    new_role: Literal["prefill", "decode", "null"] | None = None
    drain_timeout_secs: float | None = None
    wait: bool | None = None
    reload: bool | None = None
    prepare_only: bool | None = None


class CommandBody(msgspec.Struct):
    """`POST /continue_generation`, `/stop_profile`: an object whose fields are ignored."""


class PairProbeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /health_pair`: room address of the probe, and its timeout in seconds."""

    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=60)] = 4.0


class ExtractBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /extract`: the request's id, whether the snapshot has its KV bytes, and whether the request goes on."""

    rid: str
    kv: Literal["none", "bytes"] = "none"
    keep: bool = False


class SuspendBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /suspend`: the id of a live request."""

    rid: str


class ResumeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /resume`: the id of a suspended request, and what happens with its KV."""

    rid: str
    kv: Literal["require", "prefer", "ignore"] = "prefer"


class AbortBody(msgspec.Struct):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None
