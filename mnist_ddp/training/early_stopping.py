"""When to stop: pure Python, the same answer on every process that sees the same values."""

import math
from typing import Any, Literal


class EarlyStopping:
    """Counts epochs without improvement of one monitored value.

    Args:
        monitor: "accuracy", where more is better, or "loss", where less is.
        patience: epochs without improvement after which to stop, 1 or more.
        min_delta: a change must be larger than this to count.
    """

    def __init__(self, monitor: Literal["accuracy", "loss"], patience: int, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.best = -math.inf if monitor == "accuracy" else math.inf
        self.epochs_without_improvement = 0

    def update(self, accuracy: float, loss: float) -> bool:
        """Takes the values of one epoch in; whether the monitored one improved."""
        value = accuracy if self.monitor == "accuracy" else loss
        gain = value - self.best if self.monitor == "accuracy" else self.best - value
        improved = gain > self.min_delta  # false for NaN
        if improved:
            self.best = value
            self.epochs_without_improvement = 0
        else:
            self.epochs_without_improvement += 1
        return improved

    @property
    def should_stop(self) -> bool:
        return self.epochs_without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "epochs_without_improvement": self.epochs_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.epochs_without_improvement = state["epochs_without_improvement"]
