"""Transports and KV stores of other packages are found by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config.cli import parse_server_args
from pdserve.config.storage_options import StorageOptions
from pdserve.errors import ConfigError
from pdserve.memory.tiers.memory_store import MemoryStorage
from pdserve.memory.tiers.storage_registry import open_storage
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import TransportOptions
from pdserve.transfer.transports.fake import FakeTransport

MODULE = """
from pdserve.memory.tiers.memory_store import MemoryStorage
from pdserve.transfer.transports.fake import FakeTransport

def transport(host, options):
    assert (host, options.ib_device) == ("127.0.0.1", "mlx5_0")
    return FakeTransport()

def store(options):
    return MemoryStorage.open(options)
"""
ENTRY_POINTS = """
[pdserve.transports]
mine = pdserve_plugin_of_a_test:transport
broken = pdserve_plugin_of_a_test:absent

[pdserve.kv_storage]
mine = pdserve_plugin_of_a_test:store
broken = no_such_package_of_a_test:store
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "pdserve_plugin_of_a_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdserve-plugin-of-a-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "pdserve_plugin_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugin")
def test_names_of_installed_packages_are_taken_and_opened() -> None:
    words = "--model-path m --disaggregation-mode decode --disaggregation-transfer-backend mine"
    config = parse_server_args([*words.split(), "--hicache-storage-backend", "mine"])
    assert config.disagg.disaggregation_transfer_backend == config.storage.hicache_storage_backend == "mine"
    assert isinstance(open_transport("mine", "127.0.0.1", TransportOptions(ib_device="mlx5_0")), FakeTransport)
    assert isinstance(open_storage("mine", StorageOptions()), MemoryStorage)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("flag", "built_in"), [("disaggregation-transfer-backend", "mooncake"), ("hicache-storage-backend", "file")]
)
def test_another_name_is_refused_with_those_that_there_are(flag: str, built_in: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} is 'other'; there is ") as caught:
        parse_server_args(["--model-path", "m", f"--{flag}", "other"])
    assert {"broken", "mine", built_in} <= set(str(caught.value).partition("there is ")[2].split(", "))
    assert caught.value.field == flag.replace("-", "_")


@pytest.mark.usefixtures("plugin")
def test_a_package_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--disaggregation-transfer-backend broken .*cannot be loaded"):
        open_transport("broken", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"--hicache-storage-backend broken .*cannot be loaded"):
        open_storage("broken", StorageOptions())
    with pytest.raises(ConfigError, match="--disaggregation-transfer-backend is 'absent'"):
        open_transport("absent", "127.0.0.1")
