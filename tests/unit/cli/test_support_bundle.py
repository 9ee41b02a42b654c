"""`pdserve support-bundle`: what is in the archive, and that no secret is, wherever one was planted."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.redaction import Redactor, secrets_of
from pdserve.cli.support_bundle import main
from pdserve.errors import ConfigError
from tests.fleet_service import FleetService

SECRETS = {
    "flag": "flag-key-1111", "admin": "admin-key-2222", "variable": "token-in-environment-3333",
    "bearer": "bearer-4444", "url": "pass-5555", "field": "field-6666", "nested": "nested-7777",
    "log": "sk-abcdefgh8888", "command": "command-9999", "hub": "hf_abcdefgh0000", "id": "deadbeef",
}  # fmt: skip


@pytest.fixture
def service() -> Iterator[FleetService]:
    made = FleetService()
    yield made
    made.close()


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]


def test_no_secret_is_in_the_archive(
    service: FleetService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_CONTROL_TOKEN", SECRETS["variable"])
    service.keys = (SECRETS["flag"], SECRETS["admin"])
    service.infos[service.decode] |= {
        "api_key": SECRETS["field"],
        "control_token_id": SECRETS["id"],
        "hicache_storage_backend_extra_config": json.dumps({"access_key": SECRETS["nested"], "bucket": "kept"}),
        "otlp_traces_endpoint": f"http://user:{SECRETS['url']}@collector:4318",
    }
    service.workers[1]["last_error"] = f"401 for Bearer {SECRETS['bearer']}"
    service.texts["/metrics"] = f"up 1 # {SECRETS['variable']}\n"
    log = tmp_path / "router.log"
    log.write_text(
        f"started: pdserve serve m --api-key {SECRETS['command']} --port 1\n{SECRETS['log']} {SECRETS['hub']}\nkept\n"
    )
    kept = {"processes": [{"name": "decode scheduler", "lines": [f"a {SECRETS['log']}", "b"]}]}
    own = {"processes": [{"name": "router", "lines": ["started"]}], "workers": {service.decode: kept}}
    own["workers"]["http://dead:1"] = {"error": "no answer"}
    service.texts["/logs?lines=5000"] = json.dumps(own)
    output = tmp_path / "bundle.tar.gz"
    keys = ["--api-key", SECRETS["flag"], "--admin-api-key", SECRETS["admin"]]
    assert main([service.url, "-o", str(output), "--log", str(tmp_path), *keys]) == 0
    files = contents(output)
    found = [(what, name) for what, secret in SECRETS.items() for name, text in files.items() if secret in text]
    assert found == []
    assert "--port 1" in files["bundle/logs/00-router.log"]
    assert files["bundle/logs/00-router.log"].endswith("kept\n")
    assert json.loads(files["bundle/server_info.json"])["vocab_size"] == 320
    assert "bucket" in files["bundle/server_info.json"]
    assert json.loads(files["bundle/manifest.json"])["missing"] == {"logs/dead-1": "no answer"}
    assert files["bundle/logs/0-router.log"] == "started\n"
    assert files[f"bundle/logs/localhost-{service.port}-0-decode-scheduler.log"] == "a [redacted]\nb\n"
    assert {"observe.json", "workers.json", "metrics.txt", "doctor.txt", "environment.json"} <= {
        Path(name).name for name in files
    }
    assert output.stat().st_mode & 0o077 == 0
    assert f"{output}: " in capsys.readouterr().out


def test_parts_that_cannot_be_read_are_told(
    service: FleetService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.alone = True
    del service.texts["/engine_metrics"]
    output = tmp_path / "b.tar.gz"
    assert main([service.url, "-o", str(output)]) == 0
    missing = json.loads(contents(output)["b/manifest.json"])["missing"]
    assert set(missing) == {"workers.json", "loads.json", "engine_metrics.txt", "logs/"}
    assert main(["http://127.0.0.1:1", "-o", str(output)]) == 1
    assert "without server_info.json: nothing answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-o", "bundle.zip"], "--output is 'bundle.zip', but must end in .tar.gz"),
        (["-o", "/nowhere/b.tar.gz"], "--output /nowhere/b.tar.gz: No such file"),
        (["-o", "b.tar.gz", "--log", "/nowhere"], "--log /nowhere: there is no such file"),
    ],
)
def test_a_wrong_path_is_refused_by_its_flag(service: FleetService, flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        main([service.url, *flags])


def test_words_that_only_look_like_secrets_stay() -> None:
    redactor = Redactor(["ab", "long-secret"])
    assert redactor.text("table ab crab long-secret2") == "table [redacted] crab [redacted]2"
    kept = {"tokenizer_path": "m", "generation_tokens": 5, "max_tokens": 7, "token": 3, "layout": "{'a': 1}"}
    assert redactor.value(kept) == kept
    assert redactor.value({"token": "x", "api_keys": ["y"]}) == {"token": "[redacted]", "api_keys": ["[redacted]"]}
    assert secrets_of({"HF_TOKEN": "hf_secret", "SOME_KEY": "1", "PATH": "/usr/bin:/bin"}) == ["hf_secret"]
