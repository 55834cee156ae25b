"""When to stop: pure Python, the same answer on every process that sees the same values."""

import math
from typing import Any, Literal

_LOWER = 0.99  # times the best loss


class EarlyStopping:
    """Counts epochs without improvement of one monitored value.

    Accuracy on n validation samples comes in steps of 1 / n, so late in a training many epochs share the best one.
    Among those, one with a loss lower by 1% is an improvement. By less it creeps down for as long as it is let.

    Args:
        monitor: "accuracy", where more is better, "loss", where less is, or "none": each epoch is better than before.
        patience: epochs without improvement after which to stop, 1 or more.
        min_delta: a change must be larger than this to count; above 0, equal accuracy is no improvement.
    """

    def __init__(self, monitor: Literal["accuracy", "loss", "none"], patience: int, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.best_accuracy = -math.inf
        self.best_loss = math.inf
        self.epochs_without_improvement = 0

    def update(self, accuracy: float, loss: float) -> bool:
        """Takes the values of one epoch in; whether it is the best so far. NaN is never better."""
        lower_loss = self.best_loss - loss > self.min_delta
        if self.monitor == "none":
            improved = not math.isnan(loss)
        elif self.monitor == "loss":
            improved = lower_loss
        else:
            tied = self.min_delta == 0 and accuracy == self.best_accuracy
            improved = accuracy - self.best_accuracy > self.min_delta or (tied and loss < _LOWER * self.best_loss)
        if improved:
            self.best_accuracy, self.best_loss = accuracy, loss
            self.epochs_without_improvement = 0
        else:
            self.epochs_without_improvement += 1
        return improved

    @property
    def should_stop(self) -> bool:
        return self.epochs_without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_accuracy": self.best_accuracy,
            "best_loss": self.best_loss,
            "epochs_without_improvement": self.epochs_without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_accuracy = state["best_accuracy"]
        self.best_loss = state["best_loss"]
        self.epochs_without_improvement = state["epochs_without_improvement"]
