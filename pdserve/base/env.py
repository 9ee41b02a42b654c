"""Environment variables that pdserve reads, each through one typed function. Everything else is a flag."""

from __future__ import annotations

import math
import os
import re

from pdserve.errors import ConfigError

CONTROL_TOKEN = "PDSERVE_CONTROL_TOKEN"
SAME_TOKEN = f"set {CONTROL_TOKEN} to the same value on all servers"
"""What an error about the control token tells to do."""
WORKER_PROOF_KEY = "PDSERVE_WORKER_PROOF_KEY"
TRANSFER_FAILURES = ("SGLANG_TEST_DISAGG_FAILURE_PROB", "DISAGGREGATION_TEST_FAILURE_PROB")
"""SGLang's names, the newer one first: the share of writes to peers and of polls of transfers that fail, for tests."""
RETURN_ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""SGLang's: true for log probabilities before sampling parameters, false for those after them."""
DATA_PORT_FILTER = "PDSERVE_DATA_PORT_FILTER"
TRITON_INTERPRET = "TRITON_INTERPRET"
"""Defined by Triton."""


_TRUE, _FALSE = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Defined by the tokenizers library."""
OPENMP_WAIT = "OMP_WAIT_POLICY"
"""Defined by OpenMP."""


def keep_openmp_from_spinning() -> None:
    """Set OpenMP's wait policy to passive, unless the user has set one. Call it before torch is imported.

    With the default policy torch's idle threads spin for milliseconds after each operation, on cores that other
    threads compute on.
    """
    os.environ.setdefault(OPENMP_WAIT, "passive")


def tokenize_in_the_calling_thread() -> None:
    """Disable the tokenizer's own threads, unless the user has set the variable. Call it before the first use."""
    os.environ.setdefault(TOKENIZERS_PARALLELISM, "false")


def triton_is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, in numpy on CPU tensors, for tests."""
    return os.environ.get(TRITON_INTERPRET) == "1"


def transfer_failures() -> float:
    """Return the share of writes and polls that fail, 0 to 1; 0 if no variable of `TRANSFER_FAILURES` is set.

    Raises:
        ConfigError: the value is not a number from 0 to 1.
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


def returns_original_logprobs() -> bool | None:
    """Return the value of `SGLANG_RETURN_ORIGINAL_LOGPROB`; None: not set.

    Raises:
        ConfigError: the value is no boolean.
    """
    text = os.environ.get(RETURN_ORIGINAL_LOGPROB, "").strip().lower()
    if not text:
        return None
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{RETURN_ORIGINAL_LOGPROB} must be true or false, got {text!r}")
    return text in _TRUE


def control_token() -> str:
    """Return the secret that all servers of a deployment share, from `PDSERVE_CONTROL_TOKEN`; empty: not set.

    Raises:
        ConfigError: the token is not valid in an HTTP header: not printable ASCII, or with spaces inside.
    """
    token = os.environ.get(CONTROL_TOKEN, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{CONTROL_TOKEN} must be printable ASCII without spaces")
    return token


def filters_data_ports() -> bool:
    """Whether the ports of transfer engines accept connections from known addresses only; the default is True.

    Raises:
        ConfigError: `PDSERVE_DATA_PORT_FILTER` is neither 0 nor 1.
    """
    text = os.environ.get(DATA_PORT_FILTER, "").strip() or "1"
    if text not in ("0", "1"):
        raise ConfigError(f"{DATA_PORT_FILTER} must be 0 or 1, got {text!r}")
    return text == "1"


def worker_proof_secret() -> bytes | None:
    """Return the 32-byte secret for proofs to workers, which replaces the control token in a router; None: not set.

    Raises:
        ConfigError: `PDSERVE_WORKER_PROOF_KEY` is not 64 hex digits.
    """
    text = os.environ.get(WORKER_PROOF_KEY, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ConfigError(f"{WORKER_PROOF_KEY} must be 64 hex digits, as pdserve.router.worker_proof prints them")
    return bytes.fromhex(text)
