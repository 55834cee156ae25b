"""What a run did, as pictures: each function draws one and returns it as a PNG file.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart; nothing is told by colour
alone. Figures are so narrow, and their letters so large, that they can be read on a phone.
"""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from mnist_ddp.results.facts import wilson_interval

_BLUE, _ORANGE, _GREY, _PALE = "#0072B2", "#D55E00", "#5F6368", "#E3E6E8"
_DOTS_PER_INCH = 144
_WIDTH = 4.8  # inches
_STYLE: Any = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _PALE,
    "text.parse_math": False,  # a class may be named $
}


def loss_curves(metrics: Sequence[dict[str, Any]], best_epoch: int, stop: str) -> bytes:
    """Training and validation loss over the epochs.

    Args:
        metrics: the lines of metrics.jsonl, one or more.
        best_epoch: is marked.
        stop: why training ended, in a few words; stands for the line at the last epoch.
    """
    figure, axes = _figure("Loss", "mean cross-entropy (nats)")
    epochs = [line["epoch"] for line in metrics]
    marker = _marker(epochs)
    axes.plot(epochs, [line["train_loss"] for line in metrics], "--", marker=marker, color=_ORANGE, label="training*")
    val = [line["val_loss"] for line in metrics]
    axes.plot(epochs, val, marker=marker, color=_BLUE, label="validation")
    axes.set_ylim(bottom=0)
    _mark(axes, epochs, val, best_epoch, stop)
    axes.legend()  # where it hides least
    axes.set_xlabel("epoch    (* with augmentation and label smoothing)")
    return _png(figure)


def accuracy_curve(metrics: Sequence[dict[str, Any]], best_epoch: int, stop: str) -> bytes:
    """Validation accuracy over the epochs; see `loss_curves`."""
    figure, axes = _figure("Accuracy", "correct (% of validation images)")
    epochs = [line["epoch"] for line in metrics]
    val = [100 * line["val_accuracy"] for line in metrics]
    axes.plot(epochs, val, marker=_marker(epochs), color=_BLUE, label="validation")
    # The first epochs may lie below: with them, those that matter would be a flat line.
    top, middle = max(val), float(np.median(val))
    low = min(value for value in val if value >= middle - 3 * (top - middle))
    span = max(top - low, 2.0)
    axes.set_ylim(max(low - 0.6 * span, 0), top + 0.09 * span)  # legend below, ring above
    _mark(axes, epochs, val, best_epoch, stop)
    axes.legend(loc="lower right")
    return _png(figure)


def throughput(metrics: Sequence[dict[str, Any]]) -> bytes:
    """Training images per second in each epoch."""
    epochs = [line["epoch"] for line in metrics]
    rates = [line["images_per_second"] for line in metrics]
    figure, axes = _figure("Throughput", "training images per second", left=0.35 + 0.08 * len(f"{max(rates):,.0f}"))
    middle = float(np.median(rates))
    axes.plot(epochs, rates, marker=_marker(epochs), color=_BLUE, label="each epoch")
    axes.axhline(middle, color=_GREY, linewidth=1, linestyle=":", label=f"median {middle:,.0f}")
    axes.set_ylim(0, 1.1 * max(*rates, 1.0))  # an epoch that was resumed after its training has no rate
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _tick_epochs(axes, epochs)
    axes.legend(loc="lower right")
    return _png(figure)


def confusion_matrix(confusion: NDArray[np.int64], class_names: Sequence[str]) -> bytes:
    """How often which class was taken for which.

    Args:
        confusion: (classes, classes) counts; row = true class, column = predicted class.
        class_names: in label order.
    """
    n = len(class_names)
    names = [_short(name) for name in class_names]
    left, below = _room(names), _room(names) if _turned(names) else 0.6
    side = max(_WIDTH - left - 0.1, 0.24 * n)
    figure, axes = _figure(
        "Which class was taken for which", "true class", (left + side + 0.1, below + side + 0.4), left, below
    )
    diagonal = np.eye(n, dtype=bool)
    # Two scales: the few mistakes would be invisible on that of the many right answers.
    for chosen, colour in ((diagonal, _BLUE), (~diagonal, _ORANGE)):
        shown = np.ma.masked_array(np.sqrt(confusion), ~chosen | (confusion == 0))
        scale = LinearSegmentedColormap.from_list("", ["#FFFFFF", colour])
        most = math.sqrt(confusion[chosen].max(initial=1))
        axes.pcolormesh(shown, cmap=scale, vmin=0, vmax=1.6 * most, edgecolor=_PALE, linewidth=0.5)
    size = 9.0 if n <= 12 else 7.0 if n <= 30 else 5.0
    for row, column in zip(*np.nonzero(confusion), strict=True):
        weight = "normal" if row == column else "bold"
        axes.text(
            column + 0.5, row + 0.5, str(confusion[row, column]), ha="center", va="center", size=size, weight=weight
        )
    middles = np.arange(n) + 0.5
    axes.set_xticks(middles, names, rotation=90 if _turned(names) else 0, size=size)
    axes.set_yticks(middles, names, size=size)
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class")
    return _png(figure)


def class_accuracies(confusion: NDArray[np.int64], class_names: Sequence[str]) -> bytes:
    """Accuracy on the images of each class, with the range that so few images leave open; see `confusion_matrix`."""
    counts, right = confusion.sum(axis=1), confusion.diagonal()
    labels = [f"{_short(name)}:  {hits}/{count}" for name, hits, count in zip(class_names, right, counts, strict=True)]
    n = len(labels)
    inches = (_WIDTH, max(_WIDTH, 0.2 * n + 1))
    figure, axes = _figure("Accuracy per class", "class:  correct/all", inches, _room(labels))
    places = np.arange(n)
    known = counts > 0
    low, high = wilson_interval(right[known], counts[known])
    axes.hlines(places[known], 100 * low, 100 * high, color=_BLUE, alpha=0.35, linewidth=5)
    axes.plot(100 * right[known] / counts[known], places[known], "o", color=_BLUE)
    axes.set_yticks(places, labels, size=9.0 if n <= 30 else 7.0)
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xlabel("correct (% of test images; bar: 95% interval)")
    return _png(figure)


def mistakes(images: Sequence[NDArray[np.uint8]], captions: Sequence[str]) -> bytes:
    """Images with a line above each, five in a row.

    Args:
        images: (H, W) each and all the same; one or more.
        captions: one for each image.
    """
    height, width = images[0].shape
    rows, gap, head = math.ceil(len(images) / 5), math.ceil(width / 7), math.ceil(height / 3)  # in pixels
    sheet = np.full((rows * (head + height), 5 * (gap + width)), 255, np.uint8)
    corners = [(place // 5 * (head + height) + head, place % 5 * (gap + width)) for place in range(len(images))]
    for (top, left), image in zip(corners, images, strict=True):
        sheet[top : top + height, left : left + width] = image
    inches = (_WIDTH, (_WIDTH - 0.16) * sheet.shape[0] / sheet.shape[1] + 0.37)
    figure, axes = _figure("Most confident mistakes: image, true → predicted", "", inches, left=0.06, below=0.02)
    # One picture, not one for each image, which would take longer than all the others.
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
    for (top, left), caption in zip(corners, captions, strict=True):
        axes.text(left + width / 2, top - 0.05 * height, caption, ha="center", va="bottom", size=8)
    axes.set_axis_off()
    return _png(figure)


def _figure(
    title: str, y_label: str, inches: tuple[float, float] = (_WIDTH, 3.2), left: float = 0.75, below: float = 0.55
) -> tuple[Figure, Axes]:
    """A figure with room for labels on two sides, in inches. Finding the room by drawing takes twice as long."""
    with matplotlib.rc_context(_STYLE):
        # Not pyplot: it would keep the figures, and look for a screen.
        figure = Figure(inches, dpi=_DOTS_PER_INCH)
        width, height = inches
        axes = figure.add_axes((left / width, below / height, 1 - (left + 0.1) / width, 1 - (below + 0.35) / height))
        axes.set_title(title)
        axes.set_ylabel(y_label)
        axes.set_xlabel("epoch")
    return figure, axes


def _marker(epochs: Sequence[int]) -> str:
    return "." if len(epochs) <= 40 else ""


def _mark(axes: Axes, epochs: Sequence[int], values: Sequence[float], best_epoch: int, stop: str) -> None:
    """Rings the best epoch, and says at the last one why it was the last."""
    axes.axvline(epochs[-1], color=_GREY, linewidth=1, linestyle=":", label=stop)
    if best_epoch in epochs:
        value = values[epochs.index(best_epoch)]
        axes.plot(best_epoch, value, "o", mfc="none", mec="black", ms=9, label=f"best: epoch {best_epoch}")
    _tick_epochs(axes, epochs)


def _tick_epochs(axes: Axes, epochs: Sequence[int]) -> None:
    # The locator divides the range around a single epoch into fractions.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True) if len(epochs) > 1 else FixedLocator(epochs))


def _short(name: str) -> str:
    return name if len(name) <= 12 else f"{name[:11]}…"


def _turned(names: Sequence[str]) -> bool:
    """Whether they are too long to stand side by side."""
    return max(map(len, names)) > 2


def _room(labels: Sequence[str]) -> float:
    """Inches that tick labels and the name of their axis take."""
    return 0.4 + 0.085 * max(map(len, labels))


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in letters that the font lacks becomes boxes
        figure.savefig(file, format="png", pil_kwargs={"compress_level": 4})  # in half the time of the default
    return file.getvalue()
