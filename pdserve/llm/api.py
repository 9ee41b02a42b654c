"""`LLM`: the public class of the offline API."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pdserve.base.hf_tokenizer import open_hf_tokenizer
from pdserve.config import ServerConfig
from pdserve.errors import ConfigError, EngineDeadError, RequestError
from pdserve.launch_checks import LocalModel
from pdserve.llm.embedding import EmbeddingCalls
from pdserve.llm.options import Deployment, Given, plan
from pdserve.llm.outputs import InvalidRequestError, OutputMaker, RequestOutput
from pdserve.llm.prepare import (
    Adapter,
    Conversation,
    Preparer,
    Prompt,
    ReadyJob,
    ReadyPrompt,
    adapters_of,
    as_conversations,
    as_prompts,
)
from pdserve.llm.progress import UseTqdm, run_jobs
from pdserve.llm.runner import OfflineRunner
from pdserve.llm.sampling import SamplingParams
from pdserve.llm.servers import Servers
from pdserve.llm.snapshots import SnapshotCalls
from pdserve.server.context import ServerContext
from pdserve.server.generation import GenerationUpdate
from pdserve.server.request.intake import MAX_RID_CHARS
from pdserve.server.sglang_api.admin import flush_when_idle
from pdserve.server.sglang_api.lora import load_adapter, unload_adapter
from pdserve.server.snapshot_store import SnapshotStore
from pdserve.server.text.tokenizer import load_tokenizer

Params = SamplingParams | Mapping[str, Any]
SEED_BITS = 63
FLUSH_WAIT_S = 5.0
"""Seconds to wait for idle servers, which may still release sequences that have just ended."""


class LLM(EmbeddingCalls, SnapshotCalls):
    """Runs a model in child processes on this machine, for offline batches. It opens no HTTP port.

        with LLM("smollm2") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Argument names are vLLM's: `model` (or SGLang's `model_path`), `tokenizer`, `tensor_parallel_size`, `dtype`,
    `max_model_len`, `gpu_memory_utilization`. Every server flag is an argument by its Python name (`page_size=64`,
    `tp_size=2`, ...). `seed`: of random weights, and of requests without a seed, so that each run samples the same
    tokens; None: sampled tokens differ from run to run.

    `disaggregation=True` runs `num_prefill` prefill servers and `num_decode` decode servers, which share the CPU cores.
    `prefill_flags` and `decode_flags` are flags of one role only. The output tokens are the same as without it.

    `lora_paths`: LoRA adapters to load, directories by name or SGLang's list of `NAME=DIRECTORY`. `enable_lora=True`:
    adapters can be loaded later.

    Thread-safe. The processes end with `shutdown`, at the end of the `with` block, when the object is collected, or
    when this process ends in any way.

    Raises:
        ConfigError: an argument is invalid; `field` names it.
        ModelError: the model does not exist.
        EngineDeadError: a server died while it started.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        tensor_parallel_size: int | None = None,
        dtype: str | None = None,
        seed: int | None = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        disaggregation: bool = False,
        num_prefill: int | None = None,
        num_decode: int | None = None,
        prefill_flags: Mapping[str, Given] | None = None,
        decode_flags: Mapping[str, Given] | None = None,
        **flags: Given,
    ) -> None:
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << SEED_BITS):
            raise ConfigError(f"seed must be an integer in [0, 2**{SEED_BITS}), got {seed!r}", field="seed")
        given: dict[str, Given] = {
            "model": model,
            "tokenizer": tokenizer,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "seed": seed,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        if model is None and flags.get("model_path") is None:
            raise ConfigError(
                "LLM needs a model: a directory, a .gguf file, an id of the hub, or 'smollm2'", field="model"
            )
        pairs = None
        if disaggregation or num_prefill is not None or num_decode is not None:
            pairs = (1 if num_prefill is None else num_prefill, 1 if num_decode is None else num_decode)
        chosen = {name: value for name, value in given.items() if value is not None}
        self._start(plan({**chosen, **flags}, pairs, prefill_flags or {}, decode_flags or {}), seed)

    def _start(self, deployment: Deployment, seed: int | None) -> None:
        deployment = _trusting(deployment)
        config = deployment.servers[-1].config
        models = [LocalModel.find(server.config) for server in deployment.servers]  # servers find it in the cache
        self._tokenizer_dir = str(models[-1].tokenizer)
        tokenizer = load_tokenizer(self._tokenizer_dir, config.serving.chat_template)
        self._servers = Servers(deployment, tokenizer)
        self._finalizer = weakref.finalize(self, _close, self._servers)
        try:
            self._servers.start()
        except BaseException:
            self._finalizer.detach()
            raise
        others = self._servers.of("null", "decode")
        self._runner = OfflineRunner(self._servers.of("prefill"), others)
        self._preparer = Preparer(self._servers.all, seed)
        ready = others[0].context.client.require_ready()
        self._store = SnapshotStore.of(config)
        self._maker = OutputMaker(tokenizer, frozenset(ready.eos_token_ids))

    # generation ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
        lora_path: Adapter | Sequence[Adapter] = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for one or several prompts, in their order. Blocks the calling thread.

        A prompt is text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; beside them a dict may have a
        `cache_salt`, and shares cached KV with prompts of the same salt only. `sampling_params`: one for all
        prompts, or one per prompt; `SamplingParams`, or a dict with its names or SGLang's; None: the defaults.
        `use_tqdm`: show a progress bar, or a function to call in place of `tqdm`. `priority`: one per prompt, higher
        first with `enable_priority_scheduling` or `schedule_policy="priority"`; None: 0 for all. `lora_path`: name of a
        loaded LoRA adapter, for all prompts or one per prompt; None: the model itself. `request_ids`: one per prompt,
        by which `extract` and `suspend` stop it; None: numbers.

        All arguments are validated before the first request is sent. Ctrl-C aborts the running requests; the LLM stays
        usable.

        Raises:
            InvalidRequestError: an argument is invalid (also a ValueError); `field` names it. No request was sent.
            BatchError: requests failed; raised after all requests have ended, with the other outputs.
            EngineDeadError: the LLM was shut down, or a server died before the call.
        """
        given = as_prompts(prompts)
        params = one_each(sampling_params, len(given))
        priorities = _priorities(priority, len(given))
        adapters = adapters_of(lora_path, len(given))
        self._check_alive()
        ready = self._servers.loop.call(self._preparer.prompts(given))
        return self._run(ready, params, priorities, adapters, use_tqdm, _names(request_ids, len(given)))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_path: Adapter | Sequence[Adapter] = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for one or several conversations, in order. `prompt` of an output is the rendered chat.

        `chat_template` None: the model's own. `add_generation_prompt` None: True unless `continue_final_message`.
        `tools` are for the template only: tool calls and reasoning stay in the output text. The other arguments and
        errors are those of `generate`.
        """
        given = as_conversations(messages)
        params = one_each(sampling_params, len(given))
        fields = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
        }
        adapters = adapters_of(lora_path, len(given))
        self._check_alive()
        ready = self._servers.loop.call(self._preparer.conversations(given, fields))
        return self._run(ready, params, [0] * len(given), adapters, use_tqdm, _names(request_ids, len(given)))

    def _run(
        self,
        prompts: list[ReadyPrompt],
        params: list[SamplingParams],
        priorities: list[int],
        adapters: list[Adapter],
        use_tqdm: UseTqdm,
        names: Sequence[str] | None,
    ) -> list[RequestOutput]:
        """Run prepared prompts, see `run_jobs`."""
        ready = self._servers.loop.call(self._preparer.jobs(prompts, params, priorities, adapters))
        if names is not None:
            ready = [one.named(name) for one, name in zip(ready, names, strict=True)]
        return run_jobs(
            self._servers,
            self._runner,
            [one.job for one in ready],
            lambda job, updates: self._output(ready[job.number], updates),
            use_tqdm,
        )

    def _output(self, ready: ReadyJob, updates: list[GenerationUpdate]) -> RequestOutput:
        job, params = ready.job, ready.params
        return self._maker.make(
            job.request_id, ready.prompt.text, job.requests, updates, params.logprobs, params.prompt_logprobs
        )

    # LoRA adapters ---------------------------------------------------------------------------------------------------

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, str]:
        """Load the LoRA adapter in the directory `lora_path` as `lora_name` on all servers.

        Returns the directories of all loaded adapters by name.

        Raises:
            InvalidRequestError: no server can load it, or one cannot; then no server has it.
            EngineDeadError: the LLM was shut down, or a server has died.
        """
        for field, value in (("lora_name", lora_name), ("lora_path", lora_path)):
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"{field} must be text, got {value!r}", field=field)
        self._check_alive()
        return self._servers.loop.call(_load_adapter(self._contexts, lora_name, lora_path))

    def unload_lora_adapter(self, lora_name: str) -> dict[str, str]:
        """Unload a LoRA adapter on all servers once its running requests have ended; new ones are refused at once.

        Returns and raises as `load_lora_adapter`.
        """
        self._check_alive()
        return self._servers.loop.call(_unload_adapter(self._contexts, lora_name))

    # the rest --------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers; None for a model without one."""
        return open_hf_tokenizer(self._tokenizer_dir)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without `sampling_params`."""
        return SamplingParams()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache of all servers once they are idle; SGLang's name is `flush_cache`.

        Returns False if requests of other threads still ran after `FLUSH_WAIT_S` seconds. Those servers keep their
        prefix caches.

        Raises:
            EngineDeadError: the LLM was shut down, or a server has died.
        """
        self._check_alive()
        return self._servers.loop.call(_flush(self._contexts))

    flush_cache = reset_prefix_cache

    def shutdown(self) -> None:
        """End all processes. Idempotent; no other method may be called afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def _contexts(self) -> list[ServerContext]:
        return [running.context for running in self._servers.all]

    def _check_alive(self) -> None:
        if self._servers.closed:
            raise EngineDeadError("this LLM was shut down")
        for running in self._servers.all:
            running.context.client.require_ready()


async def _flush(contexts: Sequence[ServerContext]) -> bool:
    replies = await asyncio.gather(*(flush_when_idle(context, FLUSH_WAIT_S) for context in contexts))
    return all(reply.ok for reply in replies)


async def _load_adapter(contexts: Sequence[ServerContext], name: str, path: str) -> dict[str, str]:
    loaded: list[ServerContext] = []
    for context in contexts:
        try:
            problem = await load_adapter(context, name, path)
        except RequestError as error:
            problem = error.message
        if problem is not None:
            for other in loaded:
                await unload_adapter(other, name)
            raise InvalidRequestError(problem, field="lora_path", code="lora")
        loaded.append(context)
    return dict(contexts[0].adapters)


async def _unload_adapter(contexts: Sequence[ServerContext], name: str) -> dict[str, str]:
    try:
        problems = await asyncio.gather(*(unload_adapter(context, name) for context in contexts))
    except RequestError as error:
        raise InvalidRequestError.of(error) from None
    problem = next(filter(None, problems), None)
    if problem is not None:
        raise InvalidRequestError(problem, field="lora_name", code="lora")
    return dict(contexts[0].adapters)


def _close(servers: Servers) -> None:
    """Close `servers`. Called by the garbage collector in any thread, and at interpreter exit."""
    if servers.loop.is_current:  # the loop thread cannot wait for itself
        threading.Thread(target=servers.close, name="pdserve-llm-close").start()
    else:
        servers.close()


def _trusting(deployment: Deployment) -> Deployment:
    """Allow chat templates in requests, because requests come from this program."""

    def trusting(config: ServerConfig) -> ServerConfig:
        serving = dataclasses.replace(config.serving, trust_request_chat_template=True)
        return dataclasses.replace(config, serving=serving)

    servers = [dataclasses.replace(server, config=trusting(server.config)) for server in deployment.servers]
    return dataclasses.replace(deployment, servers=tuple(servers))


def one_each(given: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams | Mapping):
        return [SamplingParams.of(given)] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [SamplingParams.of(given)]  # raises
    if len(given) != count:
        message = f"sampling_params has {len(given)} entries for {count} prompts"
        raise InvalidRequestError(message, field="sampling_params")
    return [SamplingParams.of(one) for one in given]


def _names(given: Sequence[str] | None, count: int) -> list[str] | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) else list(given)
    if len(names) != count or len(set(names)) != count:
        raise InvalidRequestError(f"request_ids must be {count} different ids", field="request_ids")
    if not all(isinstance(name, str) and 1 <= len(name) <= MAX_RID_CHARS for name in names):
        raise InvalidRequestError(f"request_ids must have 1 to {MAX_RID_CHARS} characters", field="request_ids")
    return names


def _priorities(given: Sequence[int] | None, count: int) -> list[int]:
    if given is None:
        return [0] * count
    if len(given) != count:
        raise InvalidRequestError(f"priority has {len(given)} entries for {count} prompts", field="priority")
    limit = 1 << 31
    for value in given:
        if type(value) is not int or not -limit <= value < limit:
            raise InvalidRequestError(f"priority must be 32-bit integers, got {value!r}", field="priority")
    return list(given)
