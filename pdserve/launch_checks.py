"""Checks of a server's start, in the launcher's process: before anything is spawned, and before torch is imported.

    check_start ──> flags together, certificates, secret, files, libraries, ports        milliseconds
    check_model ──> model path or id, architecture, split, context, weights              a download, if it is needed

Every failure is one ConfigError or ModelError of one sentence, which the launcher prints once. What only the engine can
find out (memory, damaged weights) is reported by its processes. Called by the launchers and by `LLM`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.base.env import CONTROL_TOKEN, control_token
from pdserve.base.startup_progress import EVERY_S, told
from pdserve.config import ServerConfig
from pdserve.config.cli import parse_server_args, refuse_unknown_flags
from pdserve.config.kv_events_group import FIELD, LOAD_FIELD
from pdserve.config.resolve import BOOTSTRAP_PORT, NVIDIA_DRIVER, WSL_DRIVER, fill_in, look_at_machine
from pdserve.errors import ConfigError, ModelError, UnsupportedModelError

log = logging.getLogger(__name__)

ENGINE_MODULES = {"mori": ("mori", "amd-mori"), "ascend": ("memfabric_hybrid", "memfabric-hybrid")}
"""Module and package of the transfer backends that no extra of pdserve installs."""
TRACING_MODULE = "opentelemetry.sdk"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def parse_service(
    servers: Sequence[Sequence[str]], own_names: Iterable[str], owned: Mapping[str, str | None]
) -> list[ServerConfig]:
    """Parse the command lines of a local service's servers.

    For a misspelt flag the launcher's `own_names` are named, too. In place of a flag that it sets itself (`owned`) its
    own flag for the same purpose is named.

    Raises:
        ConfigError: as `parse_server_args`.
    """
    configs = []
    for argv in servers:
        refuse_unknown_flags(argv, own_names, owned)
        configs.append(parse_server_args(argv))
    return configs


def check_service(servers: Sequence[ServerConfig], router: Sequence[str]) -> None:
    """Check the parts of a local service once, before any of them starts: one server of each role, and the router.

    The model of an id is downloaded, so that the servers find it in the cache.

    Raises:
        ConfigError, ModelError: as `check_start` and `check_model`.
        SystemExit: a flag of the router is wrong, which is printed.
    """
    from pdserve.router.config.flags import config_from, make_parser

    for config in servers:
        check_start(config)
    part = config_from(make_parser().parse_args(router))
    check_port(part.host, part.port, "router_port")
    for config in servers:
        check_model(config)


def check_start(config: ServerConfig) -> None:
    """Check what needs neither the model nor torch. `config` is as given: before `resolve`.

    Where a GPU driver exists, torch decides on the device, so combinations of flags are checked later, by `resolve`.

    Raises:
        ConfigError: the message has the cause and what to do.
    """
    with told(log.info, "checking flags and ports", least_s=EVERY_S):
        if not (os.path.exists(NVIDIA_DRIVER) or os.path.exists(WSL_DRIVER)):
            config, _ = fill_in(config, look_at_machine())
        check_storage(config)
        config.access.tls_context()
        _check_files(config)
        _check_libraries(config)
        if config.parallel.node_rank == 0:
            _check_ports(config)


def check_storage(config: ServerConfig) -> None:
    """Refuse a store without a host tier. A later role may be without one, and the store then waits for the next."""
    if config.storage.hicache_storage_backend is not None and not config.wants_host_tier:
        text = "--hicache-storage-backend needs --enable-hierarchical-cache and a prefix cache"
        raise ConfigError(text, field="hicache_storage_backend")


def check_proof(config: ServerConfig) -> None:
    """Refuse `--require-control-proof` without a control token. Raises ConfigError."""
    if config.access.require_control_proof and not control_token():
        text = f"--require-control-proof needs {CONTROL_TOKEN} in the environment"
        raise ConfigError(text, field="require_control_proof")


def check_port(host: str, port: int, field: str) -> None:
    """Refuse a TCP port that cannot be listened on; 0 is any free port. Raises ConfigError, which names the flag."""
    if port == 0:
        return
    flag = f"--{field.replace('_', '-')}"
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = f"give {flag} another port, or 0 for any" if taken else f"change {flag} or the host"
        named = error.errno is not None and error.errno > 0  # the numbers of failed look-ups are negative
        reason = os.strerror(error.errno or 0) if named else str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; {hint}", field=field) from error


def _check_ports(config: ServerConfig) -> None:
    disagg, host = config.disagg, config.serving.host
    check_port(host, config.serving.port, "port")
    if disagg.disaggregation_mode == "prefill":
        port = disagg.disaggregation_bootstrap_port
        port = BOOTSTRAP_PORT if port is None else port
        if port == config.serving.port != 0:
            text = f"--port and --disaggregation-bootstrap-port are both {port}; they must differ"
            raise ConfigError(text, field="disaggregation_bootstrap_port")
        check_port(host, port, "disaggregation_bootstrap_port")
    if config.parallel.nnodes > 1 and config.parallel.dist_init_addr is not None:
        check_port("", int(config.parallel.dist_init_addr.rpartition(":")[2]), "dist_init_addr")
    replicas = range(config.parallel.dp_size if config.parallel.nnodes == 1 else 1)
    if config.load_endpoint is not None:
        for host, port in config.load_endpoint.ports_of(replicas):
            check_port(host, port, LOAD_FIELD)
    if config.kv_events is not None and config.wants_prefix_cache:
        for host, port in (each for bound in config.kv_events.bound for each in bound.ports_of(replicas)):
            check_port(host, port, FIELD)


def _check_files(config: ServerConfig) -> None:
    """Check files that flags name."""
    location = config.parallel.init_expert_location
    if location != "trivial" and not Path(location).is_file():
        text = f"--init-expert-location {location!r} is neither 'trivial' nor a file"
        raise ConfigError(text, field="init_expert_location")
    if config.serving.chat_template is not None:
        from pdserve.server.text.tokenizer import read_template

        read_template(config.serving.chat_template)


def _check_libraries(config: ServerConfig) -> None:
    """Check that optional packages which flags need are installed. Imports nothing but their parents."""
    backend = config.disagg.disaggregation_transfer_backend
    module, package = ENGINE_MODULES.get(backend or "", ("", ""))
    if config.disagg.disaggregation_mode != "null" and module and not _is_installed(module):
        text = f"needs {package}, which is not installed: pip install {package}"
        raise ConfigError(
            f"--disaggregation-transfer-backend {backend} {text}", field="disaggregation_transfer_backend"
        )
    if config.observe.enable_trace and not _is_installed(TRACING_MODULE):
        text = "--enable-trace needs OpenTelemetry, which is not installed: pip install 'pdserve[otel]'"
        raise ConfigError(text, field="enable_trace")
    if config.grammar.grammar_backend == "llguidance" and not _is_installed("llguidance"):
        text = "--grammar-backend llguidance is not installed: pip install llguidance, or give none"
        raise ConfigError(text, field="grammar_backend")


def _is_installed(module: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(module) is not None
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The files of a server's model on this host: `path` is a directory or a .gguf file, `tokenizer` a directory.

    `draft`: the same as `path` for an EAGLE-3 head or a draft model; None without one.
    """

    path: Path
    tokenizer: Path
    draft: Path | None = None

    @classmethod
    def find(cls, config: ServerConfig) -> LocalModel:
        """Find and check the model, and convert what needs it: the demo model, and the tokenizer of a .gguf file.

        Raises:
            ConfigError, ModelError: as `check_model`; or a conversion fails.
        """
        from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

        began = time.monotonic()
        path, tokenizer = check_model(config)
        path = resolve_model_path(config.model.model_path) if path is None else path
        tokenizer = resolve_tokenizer_path(path) if tokenizer is None else tokenizer
        draft = check_draft_model(config, path)
        log.info("model files and flags checked: %.2f s (%s)", time.monotonic() - began, path)
        return cls(path=path, tokenizer=tokenizer, draft=draft)

    def in_engine(self, config: ServerConfig) -> ServerConfig:
        """Return `config` for the engine's processes: with this host's paths in place of ids."""
        tokenizer_path = None if config.model.tokenizer_path is None else str(self.tokenizer)
        model = dataclasses.replace(
            config.model, model_path=str(self.path), revision=None, tokenizer_path=tokenizer_path
        )
        speculative = config.speculative
        if self.draft is not None:
            speculative = dataclasses.replace(speculative, speculative_draft_model_path=str(self.draft))
        return dataclasses.replace(config, model=model, speculative=speculative)


def check_model(config: ServerConfig) -> tuple[Path | None, Path | None]:
    """Check the model against the flags; the model of an id is downloaded if it is not cached. Converts nothing.

    Returns its path, None for the demo model, and the directory of `--tokenizer-path`, None without that flag.

    Raises:
        ConfigError: the flags do not fit the model.
        ModelError: the model does not exist, cannot be downloaded, or is of an unsupported kind.
    """
    from pdserve.model.file_headers import check_safetensors
    from pdserve.model.paths import is_demo_model, resolve_model_path, smollm2_gguf, weight_files

    model, path = config.model, None
    tokenizer = None if model.tokenizer_path is None else _tokenizer(model.tokenizer_path, config)
    if is_demo_model(model.model_path):
        smollm2_gguf()
        return None, tokenizer
    weights = model.load_format != "dummy"
    with _naming_remote_code(config):
        path = resolve_model_path(
            model.model_path,
            revision=model.revision,
            download_dir=model.download_dir,
            check=lambda directory: check_checkpoint(config, directory),
            weights=weights,
        )
    if weights and path.suffix != ".gguf":
        with told(log.info, "reading the headers of the weights", least_s=EVERY_S):
            for file in weight_files(path):
                check_safetensors(file)
    return path, tokenizer


def check_draft_model(config: ServerConfig, target: Path) -> Path | None:
    """Check an EAGLE-3 head or a draft model against the model at `target`; one of an id is downloaded.

    Returns its path; None without one. The engine checks what a .gguf file has, and the tokenizers.

    Raises:
        ConfigError: it is of another vocabulary or hidden size, or the model is of a family without heads.
        ModelError: it does not exist, cannot be downloaded, or is of an unsupported kind.
    """
    from pdserve.model.paths import resolve_model_path

    given = config.speculative.speculative_draft_model_path
    if given is None or config.speculative.speculative_algorithm not in ("EAGLE3", "STANDALONE"):
        return None
    try:
        return resolve_model_path(
            given,
            download_dir=config.model.download_dir,
            check=lambda draft: _check_draft(config, target, draft),
            weights=config.model.load_format != "dummy",
        )
    except ModelError as error:
        raise ModelError(f"--speculative-draft-model-path: {error}") from error


def _check_draft(config: ServerConfig, target: Path, draft: Path) -> None:
    from pdserve.model.config import read_model_spec
    from pdserve.model.drafting.spec import cannot_draft, path_refusal, read_eagle3

    if target.suffix == ".gguf" or draft.suffix == ".gguf":
        return
    try:
        spec = read_model_spec(target)
    except UnsupportedModelError as error:
        raise path_refusal(f"the model runs through transformers, for which no other model drafts: {error}") from error
    if config.speculative.speculative_algorithm == "EAGLE3":
        read_eagle3(draft, spec)
        return
    reason = cannot_draft(read_model_spec(draft), spec)
    if reason is not None:
        raise path_refusal(f"{draft} cannot draft for this model: {reason}")


def check_checkpoint(config: ServerConfig, path: Path) -> None:
    """Check architecture, split and context length of the model at `path`; of a .gguf file the architecture only.

    The engine checks the rest of a .gguf file, whose reader imports torch.

    Raises:
        ConfigError: the model cannot be split so, or its context is shorter.
        ModelError: the architecture or a feature is not supported.
    """
    from pdserve.model.config import check_spec, read_model_spec, resolve_context_length
    from pdserve.model.file_headers import check_gguf
    from pdserve.model.pooling import read_embedding_spec, read_pooling
    from pdserve.model.transformers_sources import check_architecture

    if path.suffix == ".gguf":
        check_gguf(path)
        return
    parallel = config.parallel
    if config.embedding.is_embedding:
        read_pooling(path, config.embedding.embedding_pooling)
    try:
        spec = read_embedding_spec(path) if config.embedding.is_embedding else read_model_spec(path)
    except UnsupportedModelError as error:
        if config.model.model_impl == "native":
            raise
        check_architecture(path, error)
        _refuse_split(config, error)
        return  # the engine checks the rest, which takes the import of transformers
    if config.model.model_impl == "transformers":
        _refuse_split(config, None)
    check_spec(spec, parallel.shape, parallel.ep_size, parallel.num_sharing)
    resolve_context_length(config.model.context_length, spec)


def _refuse_split(config: ServerConfig, native: UnsupportedModelError | None) -> None:
    """Refuse several ranks for a model through transformers. `native`: why no native code runs it; None: not wanted."""
    parallel = config.parallel
    if parallel.tp_size * parallel.pp_size > 1:
        field = "tp_size" if parallel.tp_size > 1 else "pp_size"
        text = f"--{field.replace('_', '-')} does not fit a model through transformers, which runs on one rank"
        raise ConfigError(text if native is None else f"{text}; native code: {native}", field=field)


@contextlib.contextmanager
def _naming_remote_code(config: ServerConfig) -> Iterator[None]:
    """Tell users of `--trust-remote-code` that it does not help a model whose own code would be needed."""
    try:
        yield
    except ModelError as error:
        if config.model.trust_remote_code and "auto_map" in str(error):
            raise ModelError(f"{error}; --trust-remote-code does not change that") from error
        raise


def _tokenizer(given: str, config: ServerConfig) -> Path:
    """Return the directory of `--tokenizer-path`, or of the id that it is. Raises ConfigError, ModelError."""
    from pdserve.model import hub

    path = Path(given).expanduser()
    if not path.exists():
        model = hub.parse_model_id(given, None, config.model.download_dir)
        if model is None:
            text = (
                f"--tokenizer-path {given!r} does not exist (looked for {path.absolute()}); give a directory or an id"
            )
            raise ConfigError(text, field="tokenizer_path")
        path = hub.fetch(model, weights=False, config=False)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        text = (
            f"--tokenizer-path {given!r} has no tokenizer: {path.absolute()} has none of {', '.join(TOKENIZER_FILES)}"
        )
        raise ConfigError(text, field="tokenizer_path")
    return path
