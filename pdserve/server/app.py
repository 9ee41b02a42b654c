"""The FastAPI application of one server: maps routes to endpoints.

`lifecycle/instance.py` creates the application. Tests create it over an in-memory scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from pdserve.base.log_ring import MAX_LINES
from pdserve.base.log_ring import PATH as LOGS_PATH
from pdserve.base.proof import token_id
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import EngineDeadError
from pdserve.http.access import (
    CLOSE_SESSION_PATH,
    COHERE_RERANK_PATH,
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    GENERATING,
    MESSAGES_PATH,
    OLLAMA_CHAT_PATH,
    OLLAMA_GENERATE_PATH,
    OLLAMA_PS_PATH,
    OLLAMA_SHOW_PATH,
    OLLAMA_TAGS_PATH,
    OLLAMA_VERSION_PATH,
    OPEN_SESSION_PATH,
    POOLING,
    RERANK_PATH,
    RESPONSES_PATH,
    RESTORE_PATH,
    SCORE_PATH,
    SNAPSHOT_TYPE,
)
from pdserve.http.background_responses import BackgroundResponses
from pdserve.http.response_store import (
    CANCEL_PATH,
    ITEMS_PATH,
    MAX_EVENT_NUMBER,
    MAX_ITEMS,
    RESPONSE_PATH,
    ResponseStore,
)
from pdserve.http.session_proof import CHALLENGE_PATH
from pdserve.http.session_store import CloseSessionBody, OpenSessionBody, OpenSessions
from pdserve.observe.history import PATH as HISTORY_PATH
from pdserve.observe.interval_stats import log_server_stats
from pdserve.observe.metrics import ServerMetrics
from pdserve.server import dashboard, openapi
from pdserve.server.anthropic_api.endpoint import count_tokens, messages
from pdserve.server.anthropic_api.schemas import MessagesBody
from pdserve.server.context import Endpoint, ServerContext
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.http import middleware
from pdserve.server.http.control_proof import ControlProof
from pdserve.server.http.drain_gate import DrainGate, DrainGateMiddleware
from pdserve.server.http.json_http import ClientGoneError, install_error_handlers
from pdserve.server.http.middleware import (
    ErrorFormMiddleware,
    HttpMetricsMiddleware,
    RequestIdMiddleware,
)
from pdserve.server.migration_client import MigrateStreamBody, MigrationClient, TakeInBody
from pdserve.server.ollama_api.facts import ollama_ps, ollama_root, ollama_show, ollama_tags, ollama_version
from pdserve.server.ollama_api.generation import ollama_chat, ollama_generate
from pdserve.server.ollama_api.schemas import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from pdserve.server.openai import models
from pdserve.server.openai.chat import chat_completions
from pdserve.server.openai.completions import completions
from pdserve.server.openai.responses import stored
from pdserve.server.openai.responses.background import in_background
from pdserve.server.openai.responses.endpoint import responses
from pdserve.server.openai.responses.schemas import ResponsesBody
from pdserve.server.pairing.single_requests import SingleRequests
from pdserve.server.pooling_api.embeddings import embeddings
from pdserve.server.pooling_api.schemas import EmbeddingsBody, RerankBody, ScoreBody
from pdserve.server.pooling_api.scoring import rerank, score
from pdserve.server.request.constraints import GrammarCheck
from pdserve.server.request.schemas import (
    AbortBody,
    ChatBody,
    CommandBody,
    CompletionBody,
    DetokenizeBody,
    ExtractBody,
    FunctionCallBody,
    GenerateBody,
    LoadLoraBody,
    MigrateBody,
    PairProbeBody,
    PauseBody,
    PeerBody,
    ProfileBody,
    ReasoningBody,
    ReplicateBody,
    ResumeBody,
    RoleSwitchBody,
    SuspendBody,
    TokenizeBody,
    UnloadLoraBody,
)
from pdserve.server.request.weights_bodies import (
    LeaveGroupBody,
    MemoryTagsBody,
    WeightNameBody,
    WeightsFromDiskBody,
    WeightsFromDistributedBody,
    WeightsFromTensorBody,
    WeightsGroupBody,
    WeightVersionBody,
)
from pdserve.server.sglang_api import (
    admin,
    commands,
    health,
    lora,
    observability,
    parse,
    sent_weights,
    sessions,
    weights,
)
from pdserve.server.sglang_api.generate import generate, in_session
from pdserve.server.sglang_api.health import PairProbes
from pdserve.server.sglang_api.memory import MemoryEndpoints
from pdserve.server.sglang_api.migrate import Migrations
from pdserve.server.sglang_api.role_switch import RoleChanger, pd_role_switch
from pdserve.server.sglang_api.snapshots import KV_RULES, SnapshotEndpoints
from pdserve.server.sglang_api.tokenize import detokenize, tokenize
from pdserve.server.snapshot_store import SnapshotStore
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.tokenizer import Tokenizer

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    MESSAGES_PATH: MessagesBody,
    COUNT_TOKENS_PATH: MessagesBody,
    EMBEDDINGS_PATH: EmbeddingsBody,
    SCORE_PATH: ScoreBody,
    RERANK_PATH: RerankBody,
    COHERE_RERANK_PATH: RerankBody,
    OLLAMA_CHAT_PATH: OllamaChatBody,
    OLLAMA_GENERATE_PATH: OllamaGenerateBody,
    OLLAMA_SHOW_PATH: OllamaShowBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/parse_function_call": FunctionCallBody,
    "/separate_reasoning": ReasoningBody,
    "/abort_request": AbortBody,
    OPEN_SESSION_PATH: OpenSessionBody,
    CLOSE_SESSION_PATH: CloseSessionBody,
    "/pause_generation": PauseBody,
    "/continue_generation": CommandBody,
    "/declare_peer_dead": PeerBody,
    "/migrate": MigrateBody,
    "/migrate_in": TakeInBody,
    "/replicate": ReplicateBody,
    "/migrate_stream": MigrateStreamBody,
    "/load_lora_adapter": LoadLoraBody,
    "/unload_lora_adapter": UnloadLoraBody,
    "/release_memory_occupation": MemoryTagsBody,
    "/resume_memory_occupation": MemoryTagsBody,
    "/get_weights_by_name": WeightNameBody,
    "/update_weights_from_disk": WeightsFromDiskBody,
    "/update_weights_from_tensor": WeightsFromTensorBody,
    "/update_weights_from_distributed": WeightsFromDistributedBody,
    "/init_weights_update_group": WeightsGroupBody,
    "/destroy_weights_update_group": LeaveGroupBody,
    "/update_weight_version": WeightVersionBody,
    "/start_profile": ProfileBody,
    "/stop_profile": CommandBody,
    "/extract": ExtractBody,
    "/suspend": SuspendBody,
    "/resume": ResumeBody,
    "/pd_role_switch": RoleSwitchBody,
    "/health_pair": PairProbeBody,
}
"""Body schema of each POST or PUT route, for the OpenAPI document."""
OPTIONAL_BODIES = frozenset(
    {
        *("/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
)
"""Routes whose body is optional."""
INPUTS = openapi.Inputs(
    BODIES,
    OPTIONAL_BODIES,
    {
        "/flush_cache": {"timeout": {"type": "number", "minimum": 0, "maximum": admin.MAX_FLUSH_WAIT_S}},
        "/get_weights_by_name": {"name": {"type": "string"}, "truncate_size": {"type": "integer", "minimum": 1}},
        "/v1/loads": {"dp_rank": {"type": "integer", "minimum": 0}},
        ITEMS_PATH: {
            "order": {"enum": ["asc", "desc"]},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
            "after": {"type": "string"},
        },
        RESPONSE_PATH: {
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0, "maximum": MAX_EVENT_NUMBER},
        },
        HISTORY_PATH: {name: {"type": "number", "minimum": 0} for name in ("seconds", "since")},
        LOGS_PATH: {"lines": {"type": "integer", "minimum": 1, "maximum": MAX_LINES}},
        "/v1/models": {
            "limit": {"type": "integer", "minimum": 1, "maximum": models.MAX_LIMIT},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
        RESTORE_PATH: {"kv": {"type": "string", "enum": list(KV_RULES)}},
        CHALLENGE_PATH: {"nonce": {"type": "string", "pattern": "^[0-9a-f]{32}$"}},
    },
    {RESTORE_PATH: SNAPSHOT_TYPE},
)
"""Body schemas and query parameters of all routes, for the OpenAPI document."""
_ENGINE_TYPES: dict[DisaggMode, str] = {"null": "unified", "prefill": "prefill", "decode": "decode"}


def make_metrics(config: ServerConfig, own_counters: Callable[[], Mapping[str, float]] = dict) -> ServerMetrics:
    """Create the metrics of a server with this configuration. The engine client and the application share them.

    `own_counters` returns monotonic totals of this process; they are exported beside the scheduler's.
    """
    name = config.model.served_model_name or config.model.model_path
    engine_type = _ENGINE_TYPES[config.disagg.disaggregation_mode]
    return ServerMetrics(
        name,
        engine_type,
        own_counters,
        by_priority=config.schedule.enable_priority_scheduling,
        storage_backend=config.storage.hicache_storage_backend,
    )


def create_app(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer | None,
    metrics: ServerMetrics,
    *,
    registered: Callable[[], bool] = lambda: True,
    drain_gate: DrainGate | None = None,
    changer: RoleChanger | None = None,
    grammars: GrammarCheck | None = None,
    warm: bool = False,
    control_token: str = "",
    snapshot_store: SnapshotStore | None = None,
    adapters: dict[str, str] | None = None,
) -> FastAPI:
    """Create the application. Its lifespan starts `client` on entry and stops it on exit.

    `metrics` must be the metrics object of `client`. `registered` returns whether decode servers can find this server;
    it is False only on a prefill server whose replicas are not known yet. Pass `drain_gate` to close the gate from
    outside. Pass `changer` when the server's role can be changed. The application closes `grammars`. With `warm` the
    compile worker starts as soon as the engine is ready. `control_token` is the token that requests may prove, and
    without an API key must prove unless the configuration says otherwise; empty: no control token. `snapshot_store`
    has the suspended requests, and outlives the application; None: the application makes one. `adapters`: directories
    of the LoRA adapters that the engine has, by name, which requests change; None: those of the configuration.
    """
    drain_gate = drain_gate or DrainGate(config.disagg.disaggregation_mode)
    checks = grammars or GrammarCheck(config.grammar, tokenizer)
    access = config.access
    peers = MigrationClient(control_token, access.admin_api_key or access.api_key, access.ssl_ca_certs)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        client.start()
        if single is not None:
            single.servers.start()
        background = [asyncio.create_task(_warm_up(client, checks))] if warm else []
        if config.observe.log_stats_interval:
            stats = log_server_stats(metrics.interval, client.state, config.observe.log_stats_interval)
            background.append(asyncio.create_task(stats))
        background.append(asyncio.create_task(history.run()))
        yield
        for task in background:
            task.cancel()
        await background_responses.close()
        await client.stop()
        if single is not None:
            await single.close()
        await peers.close()
        await checks.close()
        observer.close()

    single = SingleRequests.of(config, metrics, control_token)
    app = FastAPI(title="pdserve", lifespan=lifespan, docs_url=None, redoc_url=None)
    formats = ChatFormats.of(config.serving, tokenizer)
    own_id = token_id(control_token)
    response_store = ResponseStore(config.responses.limits, time.monotonic)
    background_responses = BackgroundResponses(response_store)
    store = SnapshotStore.of(config) if snapshot_store is None else snapshot_store
    context = ServerContext(
        config, client, tokenizer, metrics, int(time.time()), checks, registered, formats, own_id,
        dict(config.lora.adapters) if adapters is None else adapters,
        prefill_servers=None if single is None else single.servers.facts,
        suspended=store,
        sessions=OpenSessions(time.monotonic),
        responses=response_store,
        background=background_responses,
    )  # fmt: skip
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)  # disconnect while the body is read
    _add_routes(app, context, drain_gate, changer, SnapshotEndpoints(context, store), single)
    migrations = Migrations(context, peers, drain_gate)
    app.add_api_route("/migrate", migrations.migrate, methods=["POST"], name="post_migrate", response_model=None)
    app.add_api_route("/replicate", migrations.replicate, methods=["POST"], name="replicate", response_model=None)
    app.add_api_route("/migrate_in", migrations.migrate_in, methods=["POST"], name="migrate_in", response_model=None)
    app.add_api_route(
        "/migrate_stream", migrations.migrate_stream, methods=["POST"], name="migrate_stream", response_model=None
    )
    proof = ControlProof(control_token, config.access.proof_rule(has_token=bool(control_token)))
    proof.install(app)
    openapi.install(app, INPUTS, with_keys=config.access.keys.some)
    openapi.install_docs(app)
    observer = observability.install(app, context)
    history = dashboard.install(app, context)
    app.add_middleware(DrainGateMiddleware, drain_gate=drain_gate)
    middleware.install(app, config.access, context.max_body_bytes, proof)
    app.add_middleware(ErrorFormMiddleware)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(HttpMetricsMiddleware, metrics=metrics.http, paths=paths)
    app.add_middleware(RequestIdMiddleware, config=config.access, logs_access=config.observe.logs_access)
    return app


async def _warm_up(client: EngineClient, checks: GrammarCheck) -> None:
    with contextlib.suppress(EngineDeadError):
        await checks.warm_up(await client.wait_ready())


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


ROUTES: tuple[tuple[str, str, str, Endpoint], ...] = (
    ("post_chat_completions", "POST", "/v1/chat/completions", chat_completions),
    ("post_completions", "POST", "/v1/completions", completions),
    ("post_responses", "POST", "/v1/responses", responses),
    ("get_response", "GET", RESPONSE_PATH, stored.get_response),
    ("delete_response", "DELETE", RESPONSE_PATH, stored.delete_response),
    ("post_cancel_response", "POST", CANCEL_PATH, stored.cancel_response),
    ("get_response_items", "GET", ITEMS_PATH, stored.response_items),
    ("post_messages", "POST", MESSAGES_PATH, messages),
    ("post_count_tokens", "POST", COUNT_TOKENS_PATH, count_tokens),
    ("post_embeddings", "POST", EMBEDDINGS_PATH, embeddings),
    ("post_score", "POST", SCORE_PATH, score),
    ("post_rerank", "POST", RERANK_PATH, rerank),
    ("post_rerank", "POST", COHERE_RERANK_PATH, rerank),
    ("post_ollama_chat", "POST", OLLAMA_CHAT_PATH, ollama_chat),
    ("post_ollama_generate", "POST", OLLAMA_GENERATE_PATH, ollama_generate),
    ("post_ollama_show", "POST", OLLAMA_SHOW_PATH, ollama_show),
    ("get_ollama_tags", "GET", OLLAMA_TAGS_PATH, ollama_tags),
    ("get_ollama_ps", "GET", OLLAMA_PS_PATH, ollama_ps),
    ("get_ollama_root", "GET HEAD", "/", ollama_root),
    ("get_ollama_version", "GET", OLLAMA_VERSION_PATH, ollama_version),
    ("post_tokenize", "POST", "/tokenize", tokenize),
    ("post_tokenize", "POST", "/v1/tokenize", tokenize),
    ("post_detokenize", "POST", "/detokenize", detokenize),
    ("post_detokenize", "POST", "/v1/detokenize", detokenize),
    ("post_parse_function_call", "POST", "/parse_function_call", parse.parse_function_call),
    ("post_separate_reasoning", "POST", "/separate_reasoning", parse.separate_reasoning),
    ("post_generate", "POST PUT", "/generate", generate),
    ("get_health_generate", "GET", "/health_generate", health.health_generate),
    ("get_model_info", "GET", "/get_model_info", admin.model_info),
    ("get_model_info", "GET", "/model_info", admin.model_info),
    ("get_server_info", "GET", "/get_server_info", admin.server_info),
    ("get_server_info", "GET", "/server_info", admin.server_info),
    ("get_get_load", "GET", "/get_load", admin.get_load),
    ("get_loads", "GET", "/v1/loads", commands.loads),
    ("get_weight_version", "GET", "/get_weight_version", admin.weight_version),
    ("get_weight_version", "GET", "/weight_version", admin.weight_version),
    ("get_version", "GET", "/version", admin.version),
    ("get_metrics", "GET", "/metrics", admin.metrics),
    ("get_logs", "GET", LOGS_PATH, admin.logs),
    ("get_models", "GET", "/v1/models", models.list_models),
    ("get_model", "GET", "/v1/models/{name:path}", models.get_model),
    ("flush_cache", "POST", "/flush_cache", admin.flush_cache),
    ("flush_cache", "GET", "/flush_cache", admin.flush_cache),
    ("clear_storage", "POST", "/hicache/storage-backend/clear", admin.clear_storage),
    ("pause_generation", "POST", "/pause_generation", commands.pause_generation),
    ("continue_generation", "POST", "/continue_generation", commands.continue_generation),
    ("declare_peer_dead", "POST", "/declare_peer_dead", commands.declare_peer_dead),
    ("load_lora_adapter", "POST", "/load_lora_adapter", lora.load_lora_adapter),
    ("unload_lora_adapter", "POST", "/unload_lora_adapter", lora.unload_lora_adapter),
    ("start_profile", "POST", "/start_profile", commands.start_profile),
    ("start_profile", "GET", "/start_profile", commands.start_profile),
    ("stop_profile", "POST", "/stop_profile", commands.stop_profile),
    ("stop_profile", "GET", "/stop_profile", commands.stop_profile),
    ("abort_request", "POST", "/abort_request", admin.abort_request),
    ("open_session", "POST", OPEN_SESSION_PATH, sessions.open_session),
    ("close_session", "POST", CLOSE_SESSION_PATH, sessions.close_session),
    ("update_weights_from_disk", "POST", "/update_weights_from_disk", weights.update_weights_from_disk),
    ("update_weights", "POST", "/update_weights_from_tensor", sent_weights.update_weights_from_tensor),
    ("update_weights", "POST", "/update_weights_from_distributed", sent_weights.update_weights_from_distributed),
    ("update_weights", "POST", "/init_weights_update_group", sent_weights.init_weights_update_group),
    ("update_weights", "POST", "/destroy_weights_update_group", sent_weights.destroy_weights_update_group),
    ("update_weight_version", "POST", "/update_weight_version", weights.update_weight_version),
)
"""Routes of the endpoints that need a server's context only: name, methods, path, endpoint."""


def _add_routes(
    app: FastAPI,
    context: ServerContext,
    drain_gate: DrainGate,
    changer: RoleChanger | None,
    snapshots: SnapshotEndpoints,
    single: SingleRequests | None,
) -> None:
    for take in (snapshots.extract, snapshots.suspend, snapshots.restore, snapshots.resume):
        command = take.__name__
        app.add_api_route(f"/{command}", take, methods=["POST"], name=f"post_{command}", response_model=None)
    for name, methods, path, endpoint in ROUTES:
        handle = context.bind(endpoint)
        if single is not None and path in GENERATING and path not in POOLING:
            handle = single.wrap(path, handle)
            handle = in_session(context, handle) if path == GENERATE_PATH else handle
        if path == RESPONSES_PATH:
            handle = in_background(context, handle, drain_gate)
            handle = stored.with_history(context, handle, pairs=single is not None)
        app.add_api_route(path, handle, methods=methods.split(), name=name, response_model=None)
    memory = MemoryEndpoints(context, drain_gate)
    for take in (memory.release_memory_occupation, memory.resume_memory_occupation, memory.get_weights_by_name):
        command = take.__name__
        app.add_api_route(f"/{command}", take, methods=["GET", "POST"], name=command, response_model=None)
    app.add_api_route(
        "/health_pair", PairProbes(context).post, methods=["POST"], name="post_health_pair", response_model=None
    )

    @app.get("/health", response_model=None)
    async def get_health() -> Response:
        return await health.health(context, drain_gate)

    @app.get("/ping", response_model=None)
    async def get_ping() -> Response:
        return Response()

    @app.get("/readiness", response_model=None)
    @app.get("/ready", response_model=None)
    async def get_ready() -> Response:
        return await health.ready(context, drain_gate)

    @app.post("/pd_role_switch", response_model=None)
    async def post_pd_role_switch(request: Request) -> Response:
        return await pd_role_switch(context, drain_gate, changer, request)
