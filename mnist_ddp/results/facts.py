"""What a report needs beyond the files that training writes: gathered once, when the run ends, into report.json."""

import base64
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnist_ddp.data.loaders import Splits, Subset
from mnist_ddp.files import write_whole

FACTS = "report.json"
_BATCH = 512
_LAUNCHED = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}  # set by torchrun, by accelerate launch


class Mistake(TypedDict):
    """An image that was taken for another class.

    Keys:
        image: its number in its file or dataset, from 1.
        true, predicted: indices into the class names.
        probability: that the model gave to the predicted class, 0 to 1.
        shape: height and width in pixels.
        pixels: uint8, row by row, in base64.
    """

    image: int
    true: int
    predicted: int
    probability: float
    shape: list[int]
    pixels: str


def gather_facts(
    splits: Splits,
    model: nn.Module,
    confusion: Tensor | None,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    versions: Mapping[str, str],
    changed_settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of report.json.

    Args:
        splits: of the run.
        model: that was tested.
        confusion: (classes, classes) of the test; None where there was none.
        autocast: what the test ran in.
        versions: of packages.
        changed_settings: those that differ from their defaults.
    """
    return {
        "command": command_line(),
        "changed_settings": dict(changed_settings),
        "versions": {
            "python": platform.python_version(),
            **versions,
            "system": f"{platform.system()} {os.uname().machine}",
        },
        "sources": {name: subset.image_set.source for name, subset in splits._asdict().items()},
        "images": {name: len(subset) for name, subset in splits._asdict().items()},
        "class_names": list(splits.train.image_set.class_names),
        "confusion": None if confusion is None else confusion.tolist(),
        "mistakes": [] if confusion is None else confident_mistakes(model, splits.test, autocast),
    }


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    write_whole(folder / FACTS, (json.dumps(facts) + "\n").encode())


@torch.inference_mode()
def confident_mistakes(
    model: nn.Module, subset: Subset, autocast: Callable[[], AbstractContextManager[Any]], count: int = 25
) -> list[Mistake]:
    """The `count` mistakes of whose wrong class the model is surest, surest first. On this process alone."""
    model.eval()
    device = next(model.parameters()).device
    images, labels = subset.image_set.images, subset.image_set.labels
    found = []
    for chosen in subset.indices.split(_BATCH):
        with autocast():
            logits = model(images.index_select(0, chosen).to(device))
        found.append(logits.float().softmax(dim=1).max(dim=1))
    probabilities_N, predicted_N = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    true_N = labels.index_select(0, subset.indices)
    wrong_M = (predicted_N != true_N).nonzero().squeeze(1)
    worst_M = wrong_M[probabilities_N[wrong_M].argsort(descending=True, stable=True)][:count]
    return [
        Mistake(
            image=int(subset.indices[place]) + 1,
            true=int(true_N[place]),
            predicted=int(predicted_N[place]),
            probability=float(probabilities_N[place]),
            shape=list(images.shape[1:]),
            pixels=base64.b64encode(images[subset.indices[place]].numpy().tobytes()).decode(),
        )
        for place in worst_M.tolist()
    ]


def image_of(mistake: Mistake) -> NDArray[np.uint8]:
    """(H, W)."""
    return np.frombuffer(base64.b64decode(mistake["pixels"]), np.uint8).reshape(mistake["shape"])


def wilson_interval(right: NDArray[Any], counts: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The 95% interval of a share that was `right` times out of `counts`, as fractions.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    z = 1.96
    share = right / counts
    middle = share + z**2 / (2 * counts)
    reach = z * np.sqrt(share * (1 - share) / counts + z**2 / (4 * counts**2))
    scale = 1 + z**2 / counts
    return (middle - reach) / scale, (middle + reach) / scale


def command_line() -> str:
    """The command that started this run, as it would be typed: that of the launcher where there is one."""
    own = ["python", *sys.argv]
    parent = Path(f"/proc/{os.getppid()}/cmdline")  # Linux only
    if _LAUNCHED.isdisjoint(os.environ) or not parent.exists():
        return shlex.join(own)
    words = parent.read_bytes().decode(errors="replace").split("\0")[:-1]
    if sys.argv[0] not in words:  # the launcher was killed, and another process has adopted this one
        return shlex.join(own)
    if os.path.basename(words[0]).startswith("python") and not words[1].startswith(
        "-"
    ):  # a script with its interpreter
        words = words[1:]
    return shlex.join([os.path.basename(words[0]), *words[1:]])
