"""Flags of speculative decoding, a group of `ServerConfig`. Names and meaning are SGLang's."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

SpeculativeAlgorithm = Literal["NGRAM", "EAGLE3", "NEXTN", "STANDALONE"]

MAX_DRAFT_TOKENS = 32
MAX_MATCH_WINDOW = 128
MAX_NGRAM_CAPACITY = 1 << 28
DEFAULT_STEPS = 3
"""Draft tokens of a model drafter; SGLang's default for most models."""
DEFAULT_NGRAM_DRAFT_TOKENS = 12
"""SGLang's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: a drafter proposes tokens, and one step verifies them."""

    speculative_algorithm: SpeculativeAlgorithm | None = flag(
        None,
        help="drafter of speculative decoding. NGRAM: looks up the last tokens in the request and in past outputs; "
        "EAGLE3: an EAGLE-3 head; NEXTN: the model's own MTP layers; STANDALONE: a small model with the same "
        "vocabulary. No speculation when absent",
        refused={
            "EAGLE": "use EAGLE3 for an EAGLE-3 head, or NEXTN for the model's own MTP layers",
            "DFLASH": "use EAGLE3, NEXTN, STANDALONE or NGRAM",
        },
    )
    speculative_draft_model_path: str | None = flag(
        None,
        help="directory with the EAGLE-3 head or the draft model, in HF safetensors; with EAGLE3 and STANDALONE",
        names=("--speculative-draft-model",),
    )
    speculative_num_steps: int | None = flag(
        None,
        help="with EAGLE3, NEXTN and STANDALONE: most draft tokens of a request per step; 3 when absent, or "
        "--speculative-num-draft-tokens less one",
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        help="most tokens of a request that a step verifies: its last token and the drafts. --speculative-num-steps "
        "plus one; with NGRAM 12 when absent",
    )
    speculative_eagle_topk: int = flag(
        1, help="candidates at each draft position: 1, a chain of drafts; trees are not supported"
    )
    speculative_adaptive: bool = flag(
        True,
        help="adapt the number of drafts to the share that is accepted and to the size of the batch; disabled: always "
        "the most drafts",
    )
    speculative_ngram_min_match_window_size: int = flag(
        2, help="with NGRAM: fewest last tokens that must occur again for a draft"
    )
    speculative_ngram_max_match_window_size: int = flag(
        12, help="with NGRAM: most last tokens that are compared; among longer matches the most recent one is used"
    )
    speculative_ngram_capacity: int = flag(
        1 << 20,
        help="with NGRAM: tokens of past outputs of this server that are kept for drafts, up to 24 bytes each; 0: none",
    )

    @property
    def is_on(self) -> bool:
        """Whether the server has a drafter."""
        return self.speculative_algorithm is not None

    @property
    def uses_draft_model(self) -> bool:
        """Whether the drafter is a model in the executor; False for NGRAM and without speculation."""
        return self.speculative_algorithm not in (None, "NGRAM")

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a request per step: `speculative_num_draft_tokens` less one; 0 without speculation."""
        if self.speculative_algorithm is None:
            return 0
        if self.speculative_num_draft_tokens is not None:
            return self.speculative_num_draft_tokens - 1
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        return DEFAULT_STEPS if self.uses_draft_model else DEFAULT_NGRAM_DRAFT_TOKENS - 1

    def check(self, model_path: str, pp_size: int) -> None:
        """Check all values.

        Raises:
            ConfigError: it names the flag, the given value and the rule.
        """
        self._check_values()
        algorithm = self.speculative_algorithm
        if algorithm is None:
            for field in _given(self):
                _refuse(field, "given", "it needs --speculative-algorithm")
            return
        if algorithm != "NGRAM":
            for field in _given(self):
                if field.startswith("speculative_ngram_"):
                    _refuse(field, "given", f"--speculative-algorithm is {algorithm}, not NGRAM")
            if pp_size > 1:
                _refuse("speculative_algorithm", algorithm, "with --pp-size above 1 it must be NGRAM")
        elif self.speculative_num_steps is not None:
            rule = "NGRAM drafts in one step: give --speculative-num-draft-tokens instead"
            _refuse("speculative_num_steps", self.speculative_num_steps, rule)
        self._check_draft_model(model_path)
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps is not None and tokens is not None and tokens != steps + 1:
            rule = f"with --speculative-num-steps {steps} it must be {steps + 1}: the last token and {steps} drafts"
            _refuse("speculative_num_draft_tokens", tokens, rule)

    def _check_values(self) -> None:
        if self.speculative_eagle_topk != 1:
            rule = "it must be 1: trees of drafts are not supported"
            _refuse("speculative_eagle_topk", self.speculative_eagle_topk, rule)
        low, high = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        for field, value, least, most in (
            ("speculative_num_steps", self.speculative_num_steps, 1, MAX_DRAFT_TOKENS - 1),
            ("speculative_num_draft_tokens", self.speculative_num_draft_tokens, 2, MAX_DRAFT_TOKENS),
            ("speculative_ngram_min_match_window_size", low, 1, MAX_MATCH_WINDOW),
            ("speculative_ngram_max_match_window_size", high, 1, MAX_MATCH_WINDOW),
            ("speculative_ngram_capacity", self.speculative_ngram_capacity, 0, MAX_NGRAM_CAPACITY),
        ):
            if value is not None and not least <= value <= most:
                _refuse(field, value, f"must be {least} to {most}")
        if low > high:
            rule = f"must be at most --speculative-ngram-max-match-window-size, {high}"
            _refuse("speculative_ngram_min_match_window_size", low, rule)

    def _check_draft_model(self, model_path: str) -> None:
        field, path, algorithm = "speculative_draft_model_path", self.speculative_draft_model_path, None
        algorithm = self.speculative_algorithm
        if path is not None and (not path.strip() or "\0" in path):
            _refuse(field, path, "must not be empty")
        if path is None and algorithm in ("EAGLE3", "STANDALONE"):
            _refuse(field, path, f"--speculative-algorithm {algorithm} needs it")
        if path is not None and algorithm == "NGRAM":
            _refuse(field, path, "--speculative-algorithm NGRAM has no draft model")
        if path not in (None, model_path) and algorithm == "NEXTN":
            _refuse(field, path, f"--speculative-algorithm NEXTN uses the MTP layers of --model-path, {model_path}")


def _given(config: SpeculativeConfig) -> list[str]:
    """Return the fields that differ from their default, but for the algorithm."""
    fields = [field for field in dataclasses.fields(config) if field.name != "speculative_algorithm"]
    return [field.name for field in fields if getattr(config, field.name) != field.default]


def _refuse(field: str, value: object, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} is {value!r}, but {rule}", field=field)
