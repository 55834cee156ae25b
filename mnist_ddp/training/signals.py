"""Stopping on request: a signal to any process stops all of them at the same step."""

import os
import signal
import time
from types import FrameType

import torch
from accelerate import Accelerator

from mnist_ddp.errors import stop_signals_received

# Seconds between two agreements. Half of it is how long a signal waits on average; a reduction of some 0.5 ms in it is
# the whole cost.
_INTERVAL_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Remembers signals, and agrees with the other processes when to act on them.

    SIGTERM, SIGINT and SIGUSR1 only set a flag until all processes have agreed. A second SIGINT ends a process at once.

    Few steps pay for the agreement: it takes place about twice a second. The number of steps between follows from their
    duration and is part of what is agreed on, so that all processes reduce at the same step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.agreed: signal.Signals | None = None
        stop_signals_received.clear()
        self._first_interrupt_time = 0.0
        self._steps_between = 1
        self._steps_left = 1
        self._last_time = time.monotonic()
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A launcher passes on the Ctrl-C that its processes have had from the terminal too: that one is not a second.
        if number == signal.SIGINT and signal.SIGINT in stop_signals_received and now - self._first_interrupt_time > 1:
            os._exit(128 + number)
        if number == signal.SIGINT and signal.SIGINT not in stop_signals_received:
            self._first_interrupt_time = now
        stop_signals_received.add(number)

    def step(self) -> bool:
        """Counts one step of training or evaluation; True, on all processes alike, once they have agreed to stop."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._reduce()
        return self.agreed is not None

    def agree(self) -> bool:
        """True if any process has had a signal. All call it together, between phases whose steps differ in time."""
        self._reduce()
        self._steps_between = self._steps_left = 1  # steps of the phase that ended say nothing about the next
        return self.agreed is not None

    def _reduce(self) -> None:
        now = time.monotonic()
        flags = [float(number in stop_signals_received) for number in _SIGNALS]
        mine = torch.tensor([*flags, now - self._last_time], dtype=torch.float32, device=self.accelerator.device)
        *raised, seconds = self.accelerator.reduce(mine, reduction="sum").tolist()
        seconds = max(seconds / self.accelerator.num_processes, 1e-6)
        # At most doubled: one quick step must not postpone the next agreement by much more than the interval.
        wanted = self._steps_between * _INTERVAL_SECONDS / seconds
        self._steps_between = max(1, int(min(wanted, 2 * self._steps_between)))
        self._steps_left = self._steps_between
        self._last_time = now
        self.agreed = next((number for number, count in zip(_SIGNALS, raised, strict=True) if count > 0), None)
