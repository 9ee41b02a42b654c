"""What a policy is: a choice that changes nothing, and what it learns of choices that were made.

    choose(candidates, request, rng) -> index      pure: the same state and arguments give the same choice
    chosen(url, request, now)                      the request goes there
    forget(url)                                    the worker is gone
    tick(now)                                      time passes: now and then, from `health`

Called by `admission` on the event loop only.
"""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Sequence

from pdserve.router.request_fields import ConversationKey


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A worker that may be chosen. `load` is in requests, see `Worker.load`."""

    url: str
    load: float


@dataclasses.dataclass(frozen=True)
class RoutedRequest:
    """What policies know of a request; None where there is nothing to go by, or where no policy asks for it.

    `prompt` is its text, or its token ids as characters; see `prompt`.
    """

    key: ConversationKey | None = None
    prompt: str | None = None


class Policy(abc.ABC):
    """One role's; candidates are never empty, and may be any subset of the role's workers.

    Most have nothing to learn, so that all but `choose` do nothing here.
    """

    uses_key = False
    uses_prompt = False
    uses_load = False

    @abc.abstractmethod
    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """The index of the candidate that should get the request."""

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:  # noqa: B027
        """A request was sent to the worker."""

    def forget(self, url: str) -> None:  # noqa: B027
        """The worker is gone for good."""

    def tick(self, now: float) -> None:  # noqa: B027
        """Called every so often, `now` in seconds."""


def least_loaded(candidates: Sequence[Candidate], rng: random.Random) -> int:
    """The candidate with the least load; ties are broken at random, so that several routers do not herd."""
    least = min(candidate.load for candidate in candidates)
    return rng.choice([index for index, candidate in enumerate(candidates) if candidate.load == least])


def is_imbalanced(candidates: Sequence[Candidate], abs_threshold: float, rel_threshold: float) -> bool:
    """Whether the busiest candidate has so much more to do than the idlest that nothing else should count.

    SGLang's rule: by more than `abs_threshold` requests, and more than `rel_threshold` times as many.
    """
    loads = [candidate.load for candidate in candidates]
    most, least = max(loads), min(loads)
    return most - least > abs_threshold and most > least * rel_threshold
