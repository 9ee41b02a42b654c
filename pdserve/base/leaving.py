"""Signals that end a process while it starts, before something else takes them over.

The exception of a signal's handler is lost where CPython lets none out: in a call-back of a weak reference, such as
that of an import's lock, and in a finalizer. So a signal is noted as well, for whoever goes on to ask.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM)


class ExitSignals(SystemExit):
    """Not KeyboardInterrupt: where that passes through `exec`, CPython ends with the signal's status, though caught."""


_told = False


def leave_at_signals() -> None:
    """From now on `ENDING` end the process with 0, by `ExitSignals` in the main thread. Call it there."""
    for number in ENDING:
        signal.signal(number, _leave)
    sys.unraisablehook = _say_what_is_lost


def leave_if_told() -> None:
    """Raises `ExitSignals` where a signal came and its exception was lost."""
    if _told:
        raise ExitSignals(0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    global _told
    _told = True
    raise ExitSignals(0)


def _say_what_is_lost(lost: sys.UnraisableHookArgs) -> None:
    if lost.exc_type is not ExitSignals:
        sys.__unraisablehook__(lost)
