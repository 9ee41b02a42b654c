"""LoRA adapters of a server: a group of `ServerConfig`. Flag names of SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

MAX_ADAPTERS = 256
MAX_RANK = 1024
DEFAULT_MAX_RANK = 64
"""Largest rank without `--max-lora-rank`, where no adapter of `--lora-paths` has a larger one."""
MAX_NAME_CHARS = 256
ANY_MODEL = ("", "default", "unknown")
"""Names that mean the model itself in requests; no adapter may have one. sglang-router sends `unknown` for a chat
without a model.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters that are served beside the model."""

    enable_lora: bool = flag(
        False,
        help="serve LoRA adapters: a request names one as its model, or as lora_path of /generate. Set by --lora-paths",
    )
    lora_paths: str | None = flag(
        None,
        help="adapters to load at start, NAME=DIRECTORY each, separated by blanks or commas; directories are in the "
        "format of PEFT",
        many=True,
    )
    max_loras_per_batch: int = flag(8, help="most adapters that are loaded at a time; all of them may be in one batch")
    max_lora_rank: int | None = flag(
        None, help="largest rank of an adapter; when absent, that of --lora-paths, at least 64"
    )

    @property
    def is_on(self) -> bool:
        """Whether adapters can be loaded."""
        return self.enable_lora or self.lora_paths is not None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Directories of the adapters of `lora_paths`, by name."""
        return dict(map(_adapter, self.lora_paths.split(","))) if self.lora_paths else {}

    def check(self, served_names: tuple[str | None, ...]) -> None:
        """Check the values. `served_names`: names of the model, which no adapter may have. Raises ConfigError."""
        if not 1 <= self.max_loras_per_batch <= MAX_ADAPTERS:
            raise ConfigError(
                f"--max-loras-per-batch is {self.max_loras_per_batch}, but must be 1 to {MAX_ADAPTERS}",
                field="max_loras_per_batch",
            )
        if self.max_lora_rank is not None and not 1 <= self.max_lora_rank <= MAX_RANK:
            raise ConfigError(
                f"--max-lora-rank is {self.max_lora_rank}, but must be 1 to {MAX_RANK}", field="max_lora_rank"
            )
        adapters = self.adapters
        given = 0 if self.lora_paths is None else len(self.lora_paths.split(","))
        reason = None
        if len(adapters) != given:
            reason = "has two adapters of one name"
        elif given > self.max_loras_per_batch:
            reason = f"has {given} adapters, more than --max-loras-per-batch {self.max_loras_per_batch}"
        else:
            wrong = next((why for why in map(wrong_name, adapters) if why is not None), None)
            taken = next((name for name in adapters if name in served_names), None)
            reason = wrong if taken is None else f"has {taken!r}, which is the model's name"
        if reason is not None:
            raise ConfigError(f"--lora-paths {reason}", field="lora_paths")


def wrong_name(name: str) -> str | None:
    """Return why `name` is no name of an adapter; None when it is one."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        return f"has the name {name[:80]!r}, which must have 1 to {MAX_NAME_CHARS} printable characters"
    if name in ANY_MODEL:
        return f"has the name {name!r}, which means the model itself"
    return None


def _adapter(text: str) -> tuple[str, str]:
    """Return name and directory of one adapter of `lora_paths`. Without a name the directory is the name."""
    name, equals, path = text.partition("=")
    if not (path if equals else name).strip():
        raise ConfigError(f"--lora-paths: {text!r} must be NAME=DIRECTORY", field="lora_paths")
    return name, path if equals else name
