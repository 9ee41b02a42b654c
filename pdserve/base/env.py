"""Environment variables that pdserve reads, each through one typed function. Everything else is a flag."""

from __future__ import annotations

import math
import os
import re

from pdserve.errors import ConfigError

CONTROL_TOKEN = "PDSERVE_CONTROL_TOKEN"
WORKER_PROOF_KEY = "PDSERVE_WORKER_PROOF_KEY"
TRANSFER_FAILURES = ("SGLANG_TEST_DISAGG_FAILURE_PROB", "DISAGGREGATION_TEST_FAILURE_PROB")
"""SGLang's names, the newer one first: the share of writes to peers that shall fail, for tests."""
TRITON_INTERPRET = "TRITON_INTERPRET"
"""Triton's own."""


TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""The tokenizers library's own."""
OPENMP_WAIT = "OMP_WAIT_POLICY"
"""OpenMP's own."""


def keep_openmp_from_spinning() -> None:
    """Torch's threads sleep at once when they have nothing to do, unless the user wants it otherwise.

    They would spin for milliseconds behind each operation, on the cores that other threads compute on. To be called
    before torch is imported.
    """
    os.environ.setdefault(OPENMP_WAIT, "passive")


def tokenize_in_the_calling_thread() -> None:
    """Batches of texts start no threads of the tokenizer's own, unless the user wants them. Before it is first used."""
    os.environ.setdefault(TOKENIZERS_PARALLELISM, "false")


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels are run by its interpreter, in numpy, on CPU tensors: for tests."""
    return os.environ.get(TRITON_INTERPRET) == "1"


def transfer_failures() -> float:
    """The share of writes to peers that shall fail, 0 to 1; 0 where no variable of `TRANSFER_FAILURES` is set.

    Raises:
        ConfigError: it is no such number.
    """
    for name in TRANSFER_FAILURES:
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} must be a number from 0 to 1, got {text!r}")
        return share
    return 0.0


def control_token() -> str:
    """The secret that the servers of one deployment share, from `PDSERVE_CONTROL_TOKEN`; empty: none.

    Raises:
        ConfigError: it cannot travel in an HTTP header: not printable ASCII, or with spaces inside.
    """
    token = os.environ.get(CONTROL_TOKEN, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{CONTROL_TOKEN} must be printable ASCII without spaces")
    return token


def worker_proof_secret() -> bytes | None:
    """The secret for proofs to workers, which a router may have instead of the control token; None: not set.

    Raises:
        ConfigError: `PDSERVE_WORKER_PROOF_KEY` is not 64 hex digits.
    """
    text = os.environ.get(WORKER_PROOF_KEY, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ConfigError(f"{WORKER_PROOF_KEY} must be 64 hex digits, as pdserve.router.worker_proof prints them")
    return bytes.fromhex(text)
