"""The interface of policies: a choice without side effects, and notifications that update the policy's state.

    choose(candidates, request, rng) -> index      pure: the same state and arguments give the same choice
    chosen(url, request, now)                      the request was sent to this worker
    forget(url)                                    the worker was removed
    tick(now)                                      called periodically by `app`

Event loop only. Called by `admission` and `app`.
"""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Sequence

from pdserve.router.request_fields import ConversationKey


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A worker that can be chosen. `load` is in requests, see `Worker.load`."""

    url: str
    load: float


@dataclasses.dataclass(frozen=True)
class RoutedRequest:
    """Properties of a request that policies use; None if the request has none, or no policy uses the property.

    `prompt` is text, or token ids as characters; see `request_fields.prompt_of`.
    """

    key: ConversationKey | None = None
    prompt: str | None = None


class Policy(abc.ABC):
    """The policy of one role. Candidates are a non-empty subset of the role's workers.

    By default only `choose` must be implemented: the notifications do nothing here.
    """

    uses_key = False
    uses_prompt = False
    uses_load = False

    @abc.abstractmethod
    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the index of the candidate that gets the request."""

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:  # noqa: B027
        """A request was sent to the worker."""

    def forget(self, url: str) -> None:  # noqa: B027
        """The worker was removed."""

    def tick(self, now: float) -> None:  # noqa: B027
        """Called periodically; `now` in seconds."""


def least_loaded(candidates: Sequence[Candidate], rng: random.Random) -> int:
    """Return the index with the least load; random among ties, so that several routers do not choose the same one."""
    least = min(candidate.load for candidate in candidates)
    return rng.choice([index for index, candidate in enumerate(candidates) if candidate.load == least])


def is_imbalanced(candidates: Sequence[Candidate], abs_threshold: float, rel_threshold: float) -> bool:
    """Whether the largest load exceeds the smallest by both thresholds, so that policies choose by load alone.

    SGLang's rule: by more than `abs_threshold` requests, and by more than the factor `rel_threshold`.
    """
    loads = [candidate.load for candidate in candidates]
    most, least = max(loads), min(loads)
    return most - least > abs_threshold and most > least * rel_threshold
