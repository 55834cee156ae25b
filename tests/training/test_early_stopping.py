"""Early stopping: when an epoch counts as an improvement, and when it is enough.

python -m pytest tests/training/test_early_stopping.py
"""

import json
import math

import pytest

from mnist_ddp.training.early_stopping import EarlyStopping

NAN = math.nan


def follow(stopper: EarlyStopping, epochs: list[tuple[float, float]]) -> list[bool]:
    """Feeds accuracy and loss of each epoch, none of them after it has stopped; what improved."""
    improved = []
    for accuracy, loss in epochs:
        assert not stopper.should_stop
        improved.append(stopper.update(accuracy, loss))
    return improved


@pytest.mark.parametrize("monitor", ["accuracy", "loss"])
@pytest.mark.parametrize(
    ("patience", "min_delta", "values", "improved"),
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
    monitor: str, patience: int, min_delta: float, values: list[float], improved: list[bool]
) -> None:
    """While the value that is not monitored says otherwise: the loss rises, or the accuracy does."""
    stopper = EarlyStopping(monitor, patience, min_delta)
    if monitor == "accuracy":
        epochs = [(value, 1.0 + epoch) for epoch, value in enumerate(values)]
    else:
        epochs = [(epoch / 10, -value) for epoch, value in enumerate(values)]
    assert follow(stopper, epochs) == improved
    assert stopper.should_stop
    best = [epoch for epoch, better in zip(epochs, improved, strict=True) if better]
    assert (stopper.best_accuracy, stopper.best_loss) == (best[-1] if best else (-math.inf, math.inf))


def test_a_lower_loss_decides_between_equal_accuracies() -> None:
    epochs = [(0.9, 0.5), (0.9, 0.4), (0.9, 0.4), (0.8, 0.1), (0.9, 0.3), (0.95, 0.6), (0.95, NAN), (0.95, 0.7)]
    stopper = EarlyStopping("accuracy", 3)
    assert follow(stopper, epochs) == [True, True, False, False, True, True, False, False]
    assert (stopper.best_accuracy, stopper.best_loss) == (0.95, 0.6)  # of one and the same epoch


def test_a_loss_that_creeps_down_between_equal_accuracies_does_not_keep_a_run_going() -> None:
    stopper = EarlyStopping("accuracy", 3)
    losses = [0.5, 0.498, 0.496, 0.4949, 0.4948, 0.4947, 0.4946]  # 0.4949 is lower than the first by more than 1%
    assert follow(stopper, [(0.9, loss) for loss in losses]) == [True, False, False, True, False, False, False]
    assert stopper.should_stop


def test_each_epoch_is_an_improvement_where_nothing_is_monitored() -> None:
    stopper = EarlyStopping("none", 1)
    assert follow(stopper, [(0.9, 0.1), (0.8, 0.2), (0.8, 0.2), (0.1, NAN)]) == [True, True, True, False]
    assert (stopper.best_accuracy, stopper.best_loss) == (0.8, 0.2)


def test_a_tie_is_no_improvement_where_a_smallest_one_is_set() -> None:
    assert follow(EarlyStopping("accuracy", 2, 0.01), [(0.9, 0.5), (0.9, 0.1), (0.9, 0.05)]) == [True, False, False]


@pytest.mark.parametrize("monitor", ["accuracy", "loss"])
def test_goes_on_from_its_state(monitor: str) -> None:
    epochs = [(0.5, 0.5), (0.7, 0.3), (0.6, 0.4), (0.7, 0.2), (0.7, 0.2), (0.69, 0.25), (0.7, 0.21)]
    whole = EarlyStopping(monitor, 3)
    expected = follow(whole, epochs)
    assert whole.should_stop
    for done in range(len(epochs)):
        first, second = EarlyStopping(monitor, 3), EarlyStopping(monitor, 3)
        improved = follow(first, epochs[:done])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert improved + follow(second, epochs[done:]) == expected
        assert second.should_stop
        assert second.state_dict() == whole.state_dict()


def test_more_patience_wakes_a_stopped_run() -> None:
    stopped, patient = EarlyStopping("accuracy", 1), EarlyStopping("accuracy", 2)
    follow(stopped, [(0.5, 1.0), (0.5, 1.0)])
    patient.load_state_dict(stopped.state_dict())
    assert stopped.should_stop
    assert not patient.should_stop
