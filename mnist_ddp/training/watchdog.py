"""Ends a process that is stuck, with the stack of where it stands.

It runs in C, without the interpreter's lock, so a process that hangs inside a native call is ended too. The state is
the module's own, as faulthandler's is the process's.
"""

import faulthandler
import time

_timeout_seconds = 0.0
_last_time = 0.0


def watch(timeout_seconds: float) -> None:
    """From now on, `beat` must come every `timeout_seconds`; else all stacks go to stderr, and the process ends."""
    global _timeout_seconds
    _timeout_seconds = timeout_seconds
    _arm()


def beat() -> None:
    """Says that this process gets on. Cheap enough for every step: most calls only read the clock."""
    if _timeout_seconds and time.monotonic() - _last_time > _timeout_seconds / 20:
        _arm()


def rest() -> None:
    """Ends the watch."""
    global _timeout_seconds
    _timeout_seconds = 0.0
    faulthandler.cancel_dump_traceback_later()


def _arm() -> None:
    global _last_time
    _last_time = time.monotonic()
    faulthandler.dump_traceback_later(_timeout_seconds, exit=True)
