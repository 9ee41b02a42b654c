"""`pdserve env`: what the report has, and that no secret is in it."""

from __future__ import annotations

import json
import os

import pytest

import pdserve
from pdserve.cli import environment
from pdserve.cli.environment import collect, main

SECRETS = {
    "HF_TOKEN": "hf_plain",
    "PDSERVE_API_KEY": "plain",
    "PDSERVE_CONTROL_TOKEN": "plain",
    "PDSERVE_SSL_KEYFILE_PASSWORD": "plain",
    "HTTPS_PROXY": "http://user:plain@proxy:3128",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=plain",
}


def test_the_report_has_versions_features_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pdserve"]["version"] == pdserve.__version__
    assert report["packages"]["torch"][0].isdigit()
    assert f"{len(os.sched_getaffinity(0))} granted" in report["CPU"]["cores"]
    assert {"shm", "mooncake", "nixl"} == set(report["transfer engines"])
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(title in text for title in report)


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("UNRELATED", "3")
    shown = collect()["environment"]
    assert {shown[name] for name in SECRETS} == {"set"}
    assert shown["OMP_NUM_THREADS"] == "3"
    assert "UNRELATED" not in shown


def test_a_torch_that_does_not_load_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(environment, "NVIDIA_DRIVER", os.devnull)
    monkeypatch.setattr("importlib.import_module", broken)
    assert "torch cannot be imported: ImportError('libcudart.so.12" in collect()["devices"]["GPU"]


def test_a_damaged_kernel_library_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise AttributeError("undefined symbol")

    monkeypatch.setattr("pdserve.base.native.best_level", broken)
    assert "cannot be read: AttributeError" in collect()["pdserve"]["CPU kernels"]
