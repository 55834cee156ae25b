"""Ends a process that is stuck, with the stack of where it stands.

It runs in C, without the interpreter's lock, so a process that hangs inside a native call is ended too. The state is
the module's own, as faulthandler's is the process's.
"""

import faulthandler
import time

# For how much longer than a collective a step may take. Those that wait for a stuck process give up first, and are not
# taken for stuck themselves; until they have told its rank and their launcher ends it, its stack has been printed.
_GRACE_SECONDS = 3.0
_collective_seconds = 0.0
_last_time = 0.0


def watch(collective_seconds: float) -> None:
    """From now on, `beat` must come in little more than `collective_seconds`, after which a collective gives up.

    Else all stacks go to stderr, and the process ends.
    """
    global _collective_seconds
    _collective_seconds = collective_seconds
    _arm()


def beat() -> None:
    """Says that this process gets on. Cheap enough for every step: most calls only read the clock."""
    if _collective_seconds and time.monotonic() - _last_time > min(1.0, _collective_seconds / 20):
        _arm()


def rest() -> None:
    """Ends the watch."""
    global _collective_seconds
    _collective_seconds = 0.0
    faulthandler.cancel_dump_traceback_later()


def _arm() -> None:
    global _last_time
    _last_time = time.monotonic()
    faulthandler.dump_traceback_later(_collective_seconds + _GRACE_SECONDS, exit=True)
