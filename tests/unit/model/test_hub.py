"""Model ids: what is taken from the cache, what is downloaded, and what a user reads when neither is possible."""

from __future__ import annotations

import errno
import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, ModelError
from pdserve.model import hub
from pdserve.model.paths import resolve_model_path
from tests.hub import BROKEN, COMMIT, GATED, FakeHub, fake_hub, lay_out

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
FILES = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": b"pieces",
    "model.safetensors": b"weights" * 1000,
}
OTHERS = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"once more",
    "modeling_own.py": b"raise SystemExit",
}
REPO = "org/name"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub; nothing else of the environment counts, and no hub can be reached."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub_of_models(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    models = {
        REPO: {**FILES, **OTHERS},
        "org/gguf": {"README.md": b"#", "model-q4.gguf": b"GGUF"},
        "org/tokenizer": {"tokenizer.json": b'{"version": "2.0"}', "tokenizer_config.json": b"{}"},
        "org/pickle": {"config.json": CONFIG, "pytorch_model.bin": b"pickle"},
        GATED: FILES,
        BROKEN: FILES,
    }
    with fake_hub(models) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_an_id_is_org_slash_name_with_a_revision() -> None:
    def parsed(text: str, revision: str | None = None) -> tuple[str, str] | None:
        model = hub.parse_model_id(text, revision)
        return None if model is None else (model.repo, model.revision)

    assert parsed("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "main")
    assert parsed("org/name@v1.0") == ("org/name", "v1.0")
    assert parsed("org/name@refs/pr/3") == ("org/name", "refs/pr/3")
    assert parsed("org/name", "dev") == parsed("org/name@dev", "dev") == ("org/name", "dev")
    for text in ("name", "/org/name", "./org/name", "a/b/c", "org/..", "org/na--me", "org/name@../../x", "~/name", ""):
        assert parsed(text) is None, text
    with pytest.raises(ConfigError, match="names another") as caught:
        parsed("org/name@v1", "v2")
    assert caught.value.field == "revision"
    with pytest.raises(ConfigError, match="not the name of a branch"):
        parsed("org/name", "../v2")


def test_the_cache_is_where_huggingface_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.hub_cache() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/h")
    assert hub.hub_cache() == tmp_path / "h/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert hub.hub_cache() == Path("/c")


@pytest.mark.parametrize("offline", ["1", ""])
def test_a_cached_model_needs_no_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, offline: str) -> None:
    snapshot = lay_out(cache, REPO, FILES)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    seen: list[Path] = []
    assert resolve_model_path(REPO, check=seen.append) == snapshot == seen[0]
    assert resolve_model_path(f"{REPO}@{COMMIT}") == snapshot
    assert resolve_model_path(REPO, revision=COMMIT) == snapshot


def test_a_revision_and_a_directory_of_ones_own(cache: Path, tmp_path: Path) -> None:
    snapshot = lay_out(tmp_path / "own", REPO, FILES, revision="v1")
    own = str(tmp_path / "own")
    assert resolve_model_path(f"{REPO}@v1", download_dir=own) == snapshot
    with pytest.raises(ModelError, match=r"is not in the cache .*/own, and http://.* cannot be reached"):
        resolve_model_path(REPO, download_dir=own)


def test_a_directory_of_that_name_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(cache, REPO, FILES)
    local = tmp_path / "org" / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_bytes(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path(REPO) == local
    with pytest.raises(ConfigError, match="--revision is for an id"):
        resolve_model_path(REPO, revision="v1")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "model 'org/name' is not in the cache"),
        ({"config.json": CONFIG}, "is without model.safetensors in the cache"),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": b'{"weight_map": {"a": "m-2.safetensors"}}'},
            "is without m-2.safetensors in the cache",
        ),
        (
            {"config.json": CONFIG, "model-00001-of-00002.safetensors": b""},
            "is without model.safetensors.index.json in the cache",
        ),
    ],
)
def test_offline_and_not_cached_is_one_sentence_that_names_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], says: str
) -> None:
    if files:
        lay_out(cache, REPO, files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as caught:
        resolve_model_path(REPO)
    assert says in str(caught.value) and f"{cache}, and HF_HUB_OFFLINE forbids" in str(caught.value)


def test_a_download_takes_config_tokenizer_and_safetensors_only(cache: Path, hub_of_models: FakeHub) -> None:
    checked: list[set[str]] = []
    path = resolve_model_path(REPO, check=lambda directory: checked.append({file.name for file in directory.iterdir()}))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert path == cache / "models--org--name" / "snapshots" / COMMIT
    assert hub_of_models.downloaded == set(FILES)
    assert checked == [set(FILES) - {"model.safetensors"}]
    asked = len(hub_of_models.asked)
    assert resolve_model_path(REPO) == path
    assert len(hub_of_models.asked) == asked, "the second start asks nothing"


def test_a_model_that_is_refused_is_refused_before_its_weights(cache: Path, hub_of_models: FakeHub) -> None:
    def refuse(directory: Path) -> None:
        raise ModelError(f"{directory}: not this one")

    with pytest.raises(ModelError, match="not this one"):
        resolve_model_path(REPO, check=refuse)
    assert "model.safetensors" not in hub_of_models.downloaded


class Interrupted(Exception):
    """Raised by a signal's handler."""


def test_a_signal_ends_a_download_at_once(cache: Path, hub_of_models: FakeHub) -> None:
    def interrupt() -> None:
        hub_of_models.is_holding.wait(30.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def raise_it(*_: object) -> None:
        raise Interrupted

    hub_of_models.held = "model.safetensors"
    before = signal.signal(signal.SIGUSR1, raise_it)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(Interrupted):
            resolve_model_path(REPO)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_download_goes_on(cache: Path, hub_of_models: FakeHub) -> None:
    lay_out(cache, REPO, {name: FILES[name] for name in ("config.json", "tokenizer.json")})
    path = resolve_model_path(REPO)
    assert {file.name for file in path.iterdir()} == set(FILES)
    assert not {"config.json", "tokenizer.json"} & hub_of_models.downloaded


def test_weights_are_left_out_where_they_are_not_needed(cache: Path, hub_of_models: FakeHub) -> None:
    path = resolve_model_path(REPO, weights=False)
    assert {file.name for file in path.iterdir()} == set(FILES) - {"model.safetensors"}


def test_a_tokenizer_needs_no_model(cache: Path, hub_of_models: FakeHub) -> None:
    model = hub.parse_model_id("org/tokenizer")
    assert model is not None
    for _ in range(2):
        path = hub.fetch(model, weights=False, config=False)
        assert {file.name for file in path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert len([asked for asked in hub_of_models.asked if "/api/" in asked and "tokenizer" in asked]) == 1
    with pytest.raises(ModelError, match=r"has no config.json with .safetensors weights"):
        resolve_model_path("org/tokenizer")


def test_the_token_is_sent(cache: Path, hub_of_models: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_model_path(REPO)
    assert hub_of_models.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "org/absent",
            r"neither a directory here, nor in the cache .*, nor a public model of http://.*; check the name",
        ),
        ("org/name@v9", r"'org/name' has no revision 'v9' at http://"),
        (GATED, r"is gated: accept its terms at http://.*/org/gated, and set HF_TOKEN"),
        (BROKEN, r"answered with status 500 for model 'org/broken'"),
        ("org/gguf", r"has only .gguf files: download one of them and give its path"),
        ("org/pickle", r"has no config.json with .safetensors weights"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(cache: Path, hub_of_models: FakeHub, model: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        resolve_model_path(model)
    assert "\n" not in str(caught.value) and "resolve" not in " ".join(hub_of_models.asked)


def test_a_hub_that_does_not_answer_is_given_up_and_named_before(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "LOOK_UP_S", 0.2)
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(ModelError, match=r"cannot be reached \(.*\); check the network"):
            resolve_model_path(REPO)
    assert f"model {REPO} is not in the cache {cache}; asking {endpoint}" in caplog.messages


def test_a_cache_that_cannot_be_written_is_named(cache: Path, hub_of_models: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot write to the cache .*set HF_HOME or --download-dir") as caught:
        resolve_model_path(REPO, download_dir=str(tmp_path / "file"))
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOTDIR


def test_a_cached_model_without_a_tokenizer_is_used_where_the_hub_has_none_either(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: FILES[name] for name in ("config.json", "model.safetensors")}
    snapshot = lay_out(cache, REPO, files)
    assert resolve_model_path(REPO) == snapshot, "the hub cannot be reached"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model_path(REPO) == snapshot
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with fake_hub({REPO: FILES}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        assert (resolve_model_path(REPO) / "tokenizer.json").is_file()
