"""Early stopping: when an epoch counts as an improvement, and when it is enough.

python -m pytest tests/training/test_early_stopping.py
"""

import json
import math

import pytest

from mnist_ddp.training.early_stopping import EarlyStopping

NAN = math.nan


def follow(stopper: EarlyStopping, values: list[float]) -> list[bool]:
    """Feeds one monitored value an epoch, and a misleading other one, until it stops; what improved."""
    improved = []
    for epoch, value in enumerate(values):
        # The value that is not monitored gets better with each epoch.
        accuracy, loss = (value, -epoch) if stopper.monitor == "accuracy" else (epoch, value)
        assert not stopper.should_stop
        improved.append(stopper.update(accuracy, loss))
    return improved


@pytest.mark.parametrize("sign, monitor", [(1, "accuracy"), (-1, "loss")])
@pytest.mark.parametrize(
    "patience, min_delta, values, improved",
    [
        (1, 0.0, [0.5, 0.5], [True, False]),
        (2, 0.0, [0.5, 0.4, 0.6, 0.6, 0.5], [True, False, True, False, False]),
        (3, 0.0, [0.5, 0.25, 0.4, 0.5], [True, False, False, False]),
        (2, 0.125, [0.5, 0.625, 0.75, 0.75, 0.875], [True, False, True, False, False]),  # more than, not as much as
        (2, 0.125, [0.5, 0.6, 0.65, 0.7, 0.7], [True, False, True, False, False]),  # small ones add up
        (2, 0.0, [NAN, 0.5, NAN, NAN], [False, True, False, False]),
        (2, 0.0, [NAN, NAN], [False, False]),
    ],
)
def test_stops_after_patience_epochs_without_improvement(
    sign: int, monitor: str, patience: int, min_delta: float, values: list[float], improved: list[bool]
) -> None:
    stopper = EarlyStopping(monitor, patience, min_delta)
    assert follow(stopper, [sign * value for value in values]) == improved
    assert stopper.should_stop
    counted = [value for value, better in zip(values, improved, strict=True) if better]
    assert stopper.best == sign * (counted[-1] if counted else -math.inf)


def test_goes_on_from_its_state() -> None:
    values = [0.5, 0.7, 0.6, 0.75, 0.75, 0.74, 0.74]
    whole = EarlyStopping("accuracy", 3, 0.01)
    expected = follow(whole, values)
    for epochs in range(len(values)):
        first, second = EarlyStopping("accuracy", 3, 0.01), EarlyStopping("accuracy", 3, 0.01)
        improved = follow(first, values[:epochs])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert improved + follow(second, values[epochs:]) == expected
        assert second.should_stop
        assert second.state_dict() == whole.state_dict()


def test_more_patience_wakes_a_stopped_run() -> None:
    stopped, patient = EarlyStopping("accuracy", 1), EarlyStopping("accuracy", 2)
    follow(stopped, [0.5, 0.5])
    patient.load_state_dict(stopped.state_dict())
    assert stopped.should_stop
    assert not patient.should_stop
