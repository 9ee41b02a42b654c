"""What a launcher checks before it starts anything: each mistake is an error of one sentence."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.config import ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.errors import ConfigError, ModelError, PdserveError
from pdserve.launch_checks import LocalModel, check_start
from tests.hub import lay_out
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def parse(*argv: str) -> ServerConfig:
    return parse_server_args(["--device", "cpu", "--port", "0", *argv])


def edited(model: Path, directory: Path, **changes: object) -> Path:
    """A model directory with a changed config and no weights."""
    directory.mkdir()
    config = json.loads((model / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_ports_are_checked_for_the_role_that_listens_on_them(taken: int) -> None:
    for flags, field in (
        (("--port", str(taken)), "port"),
        (("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(taken)), "disaggregation_boot"),
    ):
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127.0.0.1:{taken}: .*; give --.* another port"
        ) as caught:
            check_start(parse(*flags))
        assert caught.value.field is not None and caught.value.field.startswith(field)
    check_start(parse("--disaggregation-mode", "decode", "--disaggregation-bootstrap-port", str(taken)))
    with pytest.raises(ConfigError, match="are both 18998; they must differ"):
        check_start(
            parse("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "18998", "--port", "18998")
        )
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:1234: .*; change --port or the host"):
        check_start(parse("--host", "192.0.2.1", "--port", "1234"))


def test_ports_of_kv_events_are_checked_where_they_will_be_bound(taken: int) -> None:
    def flags(endpoint: str, *, bind: bool = True) -> tuple[str, str]:
        return "--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": bind})

    for address, more in ((f"127.0.0.1:{taken}", ()), (f"*:{taken}", ()), (f"127.0.0.1:{taken - 1}", ("--dp", "2"))):
        with pytest.raises(
            ConfigError, match=rf"cannot listen on .*:({taken}|{taken - 1}): .* give --kv-events-config"
        ) as caught:
            check_start(parse(*flags(f"tcp://{address}"), *more))
        assert caught.value.field == "kv_events_config"
    with pytest.raises(ConfigError, match=r"cannot listen on .* give --load-publish-endpoint"):
        check_start(parse("--load-publish-endpoint", f"tcp://127.0.0.1:{taken}"))
    used = flags(f"tcp://127.0.0.1:{taken}")
    check_start(parse(*used, "--disable-radix-cache"))
    check_start(parse(*flags(f"tcp://127.0.0.1:{taken}", bind=False)))
    for free in ("tcp://127.0.0.1:0", "tcp://eth9:5557", "ipc:///absent/e"):
        check_start(parse(*flags(free)))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mori"], "pip install amd-mori"),
        (["--chat-template", "/absent.jinja"], "cannot read the chat template /absent.jinja"),
        (["--tp", "2", "--ep", "2", "--init-expert-location", "/absent"], "neither 'trivial' nor a file"),
        (["--device", "cuda"], "--device cuda, but torch finds no GPU"),
    ],
)
def test_files_and_libraries_that_flags_need(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CONTROL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=says):
        check_start(parse("--disaggregation-bootstrap-port", "0", *flags))


def test_a_model_is_checked_against_the_flags(model: Path, tmp_path: Path) -> None:
    def refusal(path: Path, *flags: str) -> str:
        with pytest.raises(PdserveError) as caught:
            LocalModel.find(parse("--model-path", str(path), *flags))
        return str(caught.value)

    assert "context_length must be in" in refusal(model, "--context-length", "999999")
    assert "--tp-size 3 does not divide" in refusal(model, "--tp", "3")
    assert "for models with experts" in refusal(model, "--tp", "2", "--ep", "2")
    bare = edited(model, tmp_path / "bare")
    assert "has no .safetensors file" in refusal(bare)
    assert LocalModel.find(parse("--model-path", str(bare), "--load-format", "dummy")).path == bare
    (bare / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])
    assert "is cut short: it has" in refusal(bare)
    (bare / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "is a pointer of Git LFS" in refusal(bare)
    (bare / "model.safetensors").write_bytes(b"<html>not found</html>")
    assert "is not a safetensors file, or is cut short" in refusal(bare)
    foreign = edited(model, tmp_path / "foreign", architectures=["FooForCausalLM"])
    assert "'FooForCausalLM' is not supported; supported: " in refusal(foreign)
    own_code = edited(model, tmp_path / "own", architectures=["FooForCausalLM"], auto_map={"AutoModel": "foo.Foo"})
    assert "auto_map), which pdserve never runs" in refusal(own_code)
    assert refusal(own_code, "--trust-remote-code").endswith("--trust-remote-code does not change that")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 is a zip file")
    assert "is not a gguf file" in refusal(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "is a pointer of Git LFS" in refusal(tmp_path / "a.gguf")
    key, name = b"general.architecture", b"foomba"
    head = b"GGUF\x03\0\0\0" + bytes(8) + (1).to_bytes(8, "little")
    text = len(key).to_bytes(8, "little") + key + b"\x08\0\0\0" + len(name).to_bytes(8, "little") + name
    (tmp_path / "b.gguf").write_bytes(head + text)
    assert "gguf architecture 'foomba' is not supported; supported: " in refusal(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(head + text[:20])
    assert "is not a readable gguf file" in refusal(tmp_path / "c.gguf")
    assert "--tokenizer-path '/absent' does not exist" in refusal(model, "--tokenizer-path", "/absent")
    assert "has no tokenizer" in refusal(model, "--tokenizer-path", str(bare))


def test_own_code_does_not_matter_for_a_supported_architecture(model: Path, tmp_path: Path) -> None:
    path = edited(model, tmp_path / "own", auto_map={"AutoModel": "foo.Foo"})
    config = parse("--model-path", str(path), "--load-format", "dummy", "--trust-remote-code")
    assert LocalModel.find(config).path == path


def test_the_engine_gets_paths_and_users_see_ids(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    snapshot = lay_out(tmp_path / "hub", "org/name", files, revision="v1")
    config = parse("--model-path", "org/name", "--revision", "v1")
    found = LocalModel.find(config)
    assert found == LocalModel(path=snapshot, tokenizer=snapshot)
    engine = found.in_engine(config).model
    assert (engine.model_path, engine.revision, engine.tokenizer_path) == (str(snapshot), None, None)
    both = parse("--model-path", "org/name@v1", "--tokenizer-path", "org/name@v1")
    assert LocalModel.find(both).in_engine(both).model.tokenizer_path == str(snapshot)
    with pytest.raises(ModelError, match="'org/other' is not in the cache"):
        LocalModel.find(parse("--model-path", "org/other"))
