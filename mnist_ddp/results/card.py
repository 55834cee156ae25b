"""The model card, cnn/README.md, and the way of a model to the Hugging Face Hub."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.utils import disable_progress_bars

from mnist_ddp.data.reading import EMBEDDED_DIGITS
from mnist_ddp.files import write_whole
from mnist_ddp.results.facts import FACTS, wilson_interval
from mnist_ddp.words import counted

_MNIST = "ylecun/mnist"  # on the Hub
# The settings that decide what was learned. Not all: a card is public, and others name files and folders.
_TRAINING = (
    *("width", "augment", "optimizer", "lr", "warmup_steps", "schedule", "momentum", "weight_decay"),
    *("label_smoothing", "ema_decay", "max_grad_norm", "batch_size", "gradient_accumulation_steps", "epochs"),
    *("monitor", "patience", "min_delta", "target_accuracy", "seed"),
)


def write_card(folder: Path) -> None:
    """Writes cnn/README.md from the other files of the run folder; without a model there, does nothing.

    Raises:
        OSError: a file could not be read or written.
    """
    if not (folder / "cnn").is_dir():
        return
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    result, facts, config = (
        json.loads((folder / name).read_text()) for name in ("result.json", FACTS, "cnn/config.json")
    )
    write_whole(folder / "cnn" / "README.md", model_card(folder, settings, result, facts, config).encode())


def model_card(
    folder: Path,
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    facts: Mapping[str, Any],
    config: Mapping[str, Any],
) -> str:
    """The card as Markdown, with metadata in the Hub's format.

    Args:
        folder: of the run; its name stands in the example where the model is not pushed.
        settings, result, facts, config: settings.yaml, result.json, report.json and cnn/config.json.
    """
    tested = result["test_accuracy"] is not None
    accuracy = result["test_accuracy"] if tested else result["best_val_accuracy"]
    sources, part = facts["sources"], "test" if tested else "val"
    dataset_id, dataset_name = _dataset(settings, sources["train"])
    measured_id, measured_name = _dataset(settings, sources[part])
    # The program's own split is not the one that a dataset's readers know by that name.
    held_out = sources[part] == sources["train"]  # a file of its own is never the same
    data = ModelCardData(
        license="apache-2.0" if dataset_id == _MNIST else None,  # a model of other images is for their owner to license
        library_name="mnist_ddp",
        pipeline_tag="image-classification",
        tags=["image-classification", "pytorch_model_hub_mixin", "model_hub_mixin"],
        datasets=[dataset_id] if dataset_id else None,
        metrics=["accuracy"],
        model_name="ConvNet",
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=measured_id or "csv",
                dataset_name=f"{dataset_name}, {facts['images'][part]:,} held out" if held_out else measured_name,
                dataset_split=None if held_out else "test" if tested else "validation",
                metric_type="accuracy",
                metric_value=accuracy,
            )
        ],
    )
    height, width = config["image_size"]
    names = ", ".join(f"`{name}`" for name in config["class_names"])
    rows = "\n".join(f"| {name} | {settings[name]} |" for name in _TRAINING if name in settings)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    inside = not folder.is_absolute() and ".." not in folder.parts  # names of other folders stay private
    where = settings.get("push_to_hub") or os.path.join(folder if inside else folder.name, "cnn")
    chosen = settings.get("monitor") != "none"
    use, kept = ("choose the epoch", "the best") if chosen else ("watch it", "kept")
    if sources["val"] == sources["test"] != sources["train"]:
        part_taken = "which were the validation images too: no unbiased estimate"
    else:
        part_taken = "which took no part in training or in the choice of the epoch"
    of = "" if held_out else f" of {measured_name}"
    if tested:
        count = result["num_test"]
        low, high = wilson_interval(np.array([round(accuracy * count)]), np.array([count]))
        measured = (
            f"Accuracy on the {count:,} test images{of}, {part_taken}:\n"
            f"**{accuracy:.2%}**. So many images leave {low[0]:.1%} to {high[0]:.1%} open (95% interval). "
            f"Cross-entropy: {result['test_loss']:.4f} nats."
        )
    else:
        measured = (
            f"Training was interrupted after {result['epochs']} epochs and not tested yet. Accuracy on the "
            f"{facts['images']['val']:,} validation images{of}{', by which the epoch was chosen' * chosen}: "
            f"**{accuracy:.2%}**."
        )
    digits = (
        "\nThe digits are MNIST's, by Yann LeCun, Corinna Cortes and Christopher J. C. Burges, under CC BY-SA 3.0.\n"
        if _MNIST in (dataset_id, measured_id)
        else ""
    )
    return f"""---
{data.to_yaml()}
---

# ConvNet for images of {height}x{width} pixels

Four convolutions with BatchNorm, three of them strided, and a linear layer: {result["parameters"]:,} parameters.
It tells {len(config["class_names"])} classes apart: {names}.

## Use

With the code of mnist_ddp on the Python path:

```python
import torch

from mnist_ddp.model.convnet import ConvNet

model = ConvNet.from_pretrained("{where}").eval()
images = torch.zeros(1, {height}, {width}, dtype=torch.uint8)  # (N, H, W), pixels as in the training images
with torch.inference_mode():
    probabilities = model(images).softmax(dim=1)  # (N, {len(config["class_names"])})
print(model.class_names[probabilities[0].argmax()])
```

Normalisation is part of the model: it takes pixels from 0 to 255 as they are.

## Accuracy

{measured}

## Training

On {facts["images"]["train"]:,} images of {dataset_name}, with {facts["images"]["val"]:,} more to {use}:
{result["epochs"]} epochs, of which {result["best_epoch"]} was {kept}, on {result["world_size"]} x {result["device"]}.
The global batch is batch_size x {counted(result["world_size"], "process")} x gradient_accumulation_steps.
{digits}
| Setting | Value |
| --- | --- |
{rows}

With {versions}.

## Limits

- It knows images like those that it was trained on: grey, of this size, on {_background(config)} background. Others are
  read less well.
- It names one of its classes for every image, also for one that shows none of them.
- Its probabilities were not calibrated.
- How it does on images from other sources was not measured.
"""


def push(folder: Path, repo_id: str) -> str:
    """Uploads cnn/ to a repository of the Hub, which is made where it is missing.

    The token is the Hub's own: from the environment or `hf auth login`.

    Returns:
        The address of the repository.

    Raises:
        RuntimeError: it failed; the message holds no token.
    """
    disable_progress_bars()
    api = HfApi()
    try:
        address = api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder / "cnn", commit_message="Model and card")
    except Exception as error:  # whatever the network, the Hub or its client raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        token = os.environ.get("HF_TOKEN", "").strip()
        raise RuntimeError(reason.replace(token, "***") if token else reason) from None
    return str(address)


def _dataset(settings: Mapping[str, Any], source: str) -> tuple[str | None, str]:
    """The id on the Hub, None where there is none, and the name of what was read. Names of folders stay private."""
    if Path(source).resolve() == EMBEDDED_DIGITS:
        return _MNIST, "MNIST's 10,000 test digits"
    name = settings.get("dataset", "")
    if name and not Path(name).expanduser().exists():
        return name, name
    return None, Path(name or source).name


def _background(config: Mapping[str, Any]) -> str:
    return "a light" if config["mean"] > 0.5 else "a dark"
