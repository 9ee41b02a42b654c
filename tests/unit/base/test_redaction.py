"""What `Redactor` removes: secrets as logs, flags, headers and settings have them, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.base.redaction import Redactor

S = "zQ9sEcReT77x"
TEXTS = (
    f"x-api-key: {S}", f"X-Api-Key: {S}\r\nHost: a", f"Authorization: {S}", f"Authorization: Token {S}",
    f"authorization: Bearer {S}", f"Cookie: session={S}; a=b", f"Proxy-Authorization: Digest {S}",
    f"Pdserve-Proof: c1 {S}", f"headers={{'Authorization': 'Basic {S}'}}", f"http://user:{S}@host/a",
    f"http://{S}@host/a", f"redis://:{S}@host:1", f"http://user:a@{S}@host:1/x", f"https://h/p?api_key={S}&x=1",
    f"https://h/p?x=1&apikey={S}", f"https://h/p?X-Amz-Signature={S}&X-Amz-Credential={S}", f"https://h/p?sv=1&sig={S}",
    f"--api-key {S}", f"--api-key={S}", f"--admin-api-key '{S}'", f'--worker-api-key "{S}"', f"['--api-key', '{S}']",
    f'["--ssl-keyfile-password", "{S}"]', f"args: --api-key\n  {S}", f"PDSERVE_CONTROL_TOKEN={S}",
    f"export HF_TOKEN='{S}'", f'OPENAI_API_KEY="{S}"', f"AWS_SECRET_ACCESS_KEY={S}", f"aws_secret_access_key = {S}",
    f"PGPASSWORD={S}", f"DB_PASS={S}", f"password: {S}", f"api_key: {S}", f"token: {S}", f"AccountKey={S}==;E=core",
    f"SharedAccessKey={S}", f"client_secret={S}", f"{{'access_token': '{S}'}}", f'{{"accessToken": "{S}"}}',
    f'{{"private_key": "{S}"}}', f'{{\\"api_key\\": \\"{S}\\"}}', f'pass: \\"{S}\\"', f"hf_{S}abc", f"sk-ant-{S}-abc",
    f"gho_{S}aaaaa", f"github_pat_{S}aaaa", f"glpat-{S}aaaa", f"AIza{S}aaaaaaaaaaaaaaaaaaaaaaa", f"ya29.{S}aaaaa",
    f"eyJhbGciOiJIUzI1NiJ9.eyJ{S}.{S}", f"-----BEGIN PRIVATE KEY-----\n{S}\n-----END PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S}\n", f"PDSERVE_WORKER_PROOF_KEY={S}",
    f"OTEL_EXPORTER_OTLP_HEADERS=x-team={S}", f"curl -u user:{S} http://h", "known-secret-1", "ab known-secret-1cd",
)  # fmt: skip
FIELDS = (
    "api_key", "apikey", "apiKey", "api-key", "X-Api-Key", "accessKey", "secretKey", "awsSecretAccessKey", "accountKey",
    "token", "accessToken", "bearer_token", "hfToken", "control_token", "ssl_keyfile_password", "sslPassword", "pwd",
    "passphrase", "privateKey", "signing_key", "client_secret", "credentials", "proxy-authorization", "set-cookie",
    "connectionString", "worker_proof_key", "api_keys", "headers",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    {"name": "HF_TOKEN", "value": S},
    {"args": ["--api-key", S, "--port", "1"]},
    {"command": f"serve --api-key {S}"},
    {"env": {"MY_SECRET": S}},
    {"rows": [["Authorization", S]]},
    {f"Bearer {S}": 1},
)
KEPT = (
    "tokens: 5", "max_tokens=7", 'sglang:num_tokens{a="b"} 5', "token: 17", "prompt tokens=12", "key: 5",
    "--tokenizer-path foo", "http://10.0.0.1:8000/a@b", "password policy is on", "author: Max", "layout: {'a': 1}",
    "pass 3 of 4", "bos_token: <s>", "no_token: the probe failed: no token came in time: the peer",
    "status 503, no_token: http://10.0.0.1:8000: x", "give --api-key, or set PDSERVE_API_KEY", "3 keys: a",
    "no control token: the control plane", "Basic usage: pdserve", "first_token=0.5 s", "tcp://1.2.3.4:5557 kv@x",
    "refused: pdserve_version: peer differs in pdserve_version", "kv_token_bytes=768", "decode http://127.0.0.1:40385",
)  # fmt: skip


@pytest.fixture(scope="module")
def redactor() -> Redactor:
    return Redactor(["known-secret-1"])


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_removed(redactor: Redactor, text: str) -> None:
    told = redactor.text(text)
    assert S not in told and "known-secret" not in told
    assert redactor.text(told).replace("[redacted]", "") == told.replace("[redacted]", ""), "it stays so"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_with_the_name_of_a_secret_is_removed(redactor: Redactor, field: str) -> None:
    for value in ({field: S}, {field: [S]}, {field: {"value": [S]}}, {"extra": json.dumps({field: S})}):
        assert S not in json.dumps(redactor.value(value)), value


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_its_neighbour_names_is_removed(redactor: Redactor, value: Any) -> None:
    told = json.dumps(redactor.value(value))
    assert S not in told
    assert "--port" in told or "--port" not in json.dumps(value)


@pytest.mark.parametrize("text", KEPT)
def test_other_texts_stay(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text
    assert redactor.value({"text": text, "completion_tokens": 5}) == {"text": text, "completion_tokens": 5}


@pytest.mark.timeout(60)
def test_a_long_text_that_looks_like_secrets_takes_no_long_time(redactor: Redactor) -> None:
    """A form that looks ahead to the end of such a text at each place takes minutes."""
    text = "token=" * 50_000
    assert redactor.text(text) == text
