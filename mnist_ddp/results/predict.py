"""What a trained model reads in new images, one row for each, as CSV.

python -m mnist_ddp.results.predict pt/ digits.csv -o predictions.csv
python -m mnist_ddp.results.predict pt/ scans/ -o predictions.csv              # PNG and JPEG files
python -m mnist_ddp.results.predict pt/ ylecun/mnist -o predictions.csv        # a dataset of the Hub
torchrun --standalone --nproc_per_node 2 -m mnist_ddp.results.predict pt/ digits.csv -o predictions.csv
"""

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from mnist_ddp.data.hub import read_dataset
from mnist_ddp.data.reading import read_table
from mnist_ddp.distributed import gather_rows, launch, leaving, start_accelerator, together
from mnist_ddp.errors import UserError, exit_with_one_line
from mnist_ddp.files import write_whole
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.settings import Settings
from mnist_ddp.words import counted

_BATCH = 512  # images per process and step
_SUFFIXES = (".png", ".jpg", ".jpeg")
_TABLES = (".csv", ".tsv", ".txt", ".gz", ".xz", ".zst")


@dataclass(frozen=True)
class Inputs:
    """What to predict.

    Attributes:
        names: of the images; None where they are told by their numbers.
        images: (N, H, W) uint8.
        labels: (N,) int64 indices into the model's classes; None where there are none.
        notes: what to tell the user, a line each.
    """

    names: list[str] | None
    images: Tensor
    labels: Tensor | None
    notes: tuple[str, ...]


def predict(args: argparse.Namespace) -> int:
    """Reads, predicts and writes, on each process its share of the rows.

    Returns:
        The exit status.
    """
    accelerator = start_accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=1,
        timeout_seconds=600.0,
        log_with="none",
        project_dir="",
    )
    with leaving(accelerator):
        model = together(lambda: load_model(args.folder))
        inputs = together(lambda: read_inputs(args, model))
        share = inputs.images.tensor_split(accelerator.num_processes)[accelerator.process_index]
        predicted, probabilities = forward(accelerator, model, share)
        predicted_N, probabilities_N = gather_rows(predicted), gather_rows(probabilities)
        if accelerator.is_main_process:
            for note in inputs.notes:
                print(f"note: {note}")
            write(args.output, args.format, inputs.names, model.class_names, predicted_N, probabilities_N)
            said = f"{counted(len(predicted_N), 'prediction')} in {args.output}"
            if inputs.labels is not None:
                right = int((predicted_N == inputs.labels).sum())
                said += f"; accuracy {right / len(predicted_N):.2%} ({right:,} right)"
            print(said)
    return 0


def load_model(folder: Path) -> ConvNet:
    """The model of a run folder, or of a folder that `save_pretrained` wrote.

    Raises:
        UserError: there is none.
    """
    path = folder / "cnn" if (folder / "cnn").is_dir() else folder
    if not (path / "model.safetensors").is_file() or not (path / "config.json").is_file():
        raise UserError(f"{folder}: holds no model, which would be in {folder / 'cnn'}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that the folder is local
            return ConvNet.from_pretrained(path)
    except Exception as error:  # damage shows as almost any error
        raise UserError(f"{path}: the model cannot be loaded: {' '.join(str(error).split())[:200]}") from error


@torch.inference_mode()
def forward(accelerator: Accelerator, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted classes (N,) int64 and their probabilities (N,) float32, on the CPU.

    Args:
        accelerator: gives device and precision.
        model: is moved to the device.
        images: (N, H, W) uint8; this process's share.
    """
    model.eval().to(accelerator.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
    classes, probabilities = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
    for batch in images.split(_BATCH) if len(images) else ():  # with more processes than images, some have none
        with accelerator.autocast():
            logits = model(batch.to(accelerator.device))
        best = logits.float().softmax(dim=1).max(dim=1)
        classes.append(best.indices)
        probabilities.append(best.values)
    return torch.cat([part.cpu() for part in classes]), torch.cat([part.cpu() for part in probabilities])


# ---- inputs


def read_inputs(args: argparse.Namespace, model: ConvNet) -> Inputs:
    """The images that the command names.

    Raises:
        UserError: they cannot be read, or do not fit the model.
    """
    files = image_files([Path(name) for name in args.input])
    if files:
        return read_image_files(files, model)
    if len(args.input) > 1:
        raise UserError(f"{args.input[1]}: only PNG and JPEG files can be several; give one file, folder or dataset")
    (name,) = args.input
    if Path(name).is_file() or name.endswith(_TABLES):
        table = read_table(name, label_column=args.label_column, transposed=args.transposed, cache_dir=args.cache_dir)
        images, labels, class_names, notes = table.images, table.labels, table.class_names, table.notes
    else:
        height, width = model.image_size
        size = height if height == width else 0
        try:
            sets = read_dataset(name, label_column=args.label_column, image_size=size, cache_dir=args.cache_dir)
        except UserError as error:
            raise UserError(str(error).removeprefix("--dataset ")) from error
        split = args.split or next(known for known in ("test", "validation", "train") if known in sets)
        if split not in sets:
            raise UserError(f"--split {split}: {name} has {', '.join(sets)}")
        images, labels, class_names = sets[split].images, sets[split].labels, sets[split].class_names
        notes = sets["train"].notes + ((f"of {', '.join(sets)}, {split} is predicted",) if len(sets) > 1 else ())
    if tuple(images.shape[1:]) != model.image_size:
        sizes = ["x".join(map(str, size)) for size in (images.shape[1:], model.image_size)]
        raise UserError(f"{name}: images of {sizes[0]} pixels, but the model was trained on {sizes[1]}")
    shades = ("dark", "light")
    is_light, was_light = bool(images[:1000].float().mean() > 127.5), model.mean > 0.5
    if is_light != was_light:
        notes += (
            f"{name}: the images are mostly {shades[is_light]}, those that the model was trained on mostly "
            f"{shades[was_light]}; if they are inverted, predictions are wrong: subtract the pixels from 255",
        )
    if labels is not None:
        known = torch.tensor([model.class_names.index(c) if c in model.class_names else -1 for c in class_names])
        labels = known[labels]
        if (labels < 0).any():
            unknown = next(c for c in class_names if c not in model.class_names)
            notes += (f"label {unknown} is not among the model's classes, so accuracy is not computed",)
            labels = None
    return Inputs(None, images, labels, notes)


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The PNG and JPEG files among `paths` and directly in folders among them, those of a folder by name.

    Raises:
        UserError: there are such files beside others.
    """
    found, others = [], []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES) if path.is_dir() else []
        if path.suffix.lower() in _SUFFIXES and not path.is_dir():
            inside = [path]
        found += inside
        others += [] if inside else [path]
    if found and others:
        raise UserError(f"{others[0]}: is no PNG or JPEG file, nor a folder that holds some, as the others are")
    return found


def read_image_files(files: Sequence[Path], model: ConvNet) -> Inputs:
    """Grey images of the model's size, with the background that it was trained on.

    Raises:
        UserError: a file is no image.
    """
    light = model.mean > 0.5  # what it was trained on is mostly background
    with ThreadPoolExecutor() as pool:  # PIL releases the lock while it decodes
        decoded = list(pool.map(lambda file: read_image_file(file, model.image_size, light), files))
    inverted = [file for file, (_, was_inverted) in zip(files, decoded, strict=True) if was_inverted]
    notes = []
    if inverted:
        kinds = "light on dark" if light else "dark on light"
        which = f"{inverted[0]} is" if len(inverted) == 1 else f"{len(inverted):,} of {len(files):,} files are"
        notes.append(f"{which} {kinds}, unlike the images that the model was trained on; inverted")
    images = torch.from_numpy(np.stack([image for image, _ in decoded]))
    return Inputs([str(file) for file in files], images, None, tuple(notes))


def read_image_file(path: Path, size: Sequence[int], light: bool) -> tuple[NDArray[np.uint8], bool]:
    """(H, W) of one file, and whether it was inverted.

    Args:
        path: a PNG or JPEG file; colour becomes grey, what is transparent background.
        size: height and width to which it is resized, with background at two sides where its shape differs.
        light: whether its background is to be light. The background is told by the border.

    Raises:
        UserError: it is no image.
    """
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)  # a phone stores how it was held
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not an image: {getattr(error, 'strerror', None) or error}") from error
    if image.mode.startswith("I;16"):  # convert would clip it
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        # What is not transparent is ink, and the background its opposite.
        layer = image.convert("RGBA")
        ink = np.asarray(layer.convert("L"))[np.asarray(layer)[..., 3] > 127]
        paper = "white" if len(ink) and ink.mean() < 128 else "black"
        image = Image.alpha_composite(Image.new("RGBA", layer.size, paper), layer)
    grey = image.convert("L")
    pixels = np.asarray(grey)
    background = int(np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])))
    inverted = (background > 127) != light
    resized = np.asarray(ImageOps.pad(grey, (size[1], size[0]), Image.Resampling.BILINEAR, background))
    return 255 - resized if inverted else resized, inverted


# ---- output


def write(
    path: Path,
    layout: str,
    names: Sequence[str] | None,
    class_names: Sequence[str],
    predicted: Tensor,
    probabilities: Tensor,
) -> None:
    """Writes the CSV, complete or not at all.

    Args:
        path: of the file.
        layout: "plain" for file or row (from 1), label and probability; "kaggle" for ImageId (from 1) and Label.
        names: of the images; None for their numbers.
        class_names: in label order.
        predicted: (N,) int64.
        probabilities: (N,) of the predicted class, 0 to 1.

    Raises:
        UserError: it cannot be written.
    """
    labels = [class_names[index] for index in predicted.tolist()]
    numbers = range(1, len(labels) + 1)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if layout == "kaggle":
        writer.writerow(["ImageId", "Label"])
        writer.writerows(zip(numbers, labels, strict=True))
    else:
        writer.writerow(["row" if names is None else "file", "label", "probability"])
        shares = [f"{value:.6f}" for value in probabilities.tolist()]
        writer.writerows(zip(numbers if names is None else names, labels, shares, strict=True))
    try:
        write_whole(path, text.getvalue().encode(errors="surrogateescape"))  # names of files may be no UTF-8
    except OSError as error:
        raise UserError(f"-o {path}: cannot be written: {error.strerror}") from error


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m mnist_ddp.results.predict", description="Predict the class of each image with a trained model."
    )
    parser.add_argument("folder", type=Path, help="run folder, such as pt/, or a folder with a model")
    parser.add_argument(
        "input", nargs="+", help="a CSV file; or PNG and JPEG files or folders of them; or what datasets loads"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.csv", help="file to write")
    parser.add_argument(
        "--format", choices=("plain", "kaggle"), default="plain", help="plain: row or file, label, probability"
    )
    parser.add_argument("--label_column", default="", help="as in training; for a CSV file or a dataset")
    parser.add_argument("--transposed", action="store_true", help="the images of the CSV file are stored by column")
    parser.add_argument("--split", default="", help="of a dataset: train, validation or test (default: test, if any)")
    parser.add_argument(
        "--mixed_precision", choices=("auto", "no", "bf16", "fp16"), default="auto", help="as in training"
    )
    parser.add_argument("--cache_dir", default=Settings.cache_dir, help="folder that keeps parsed files; empty: none")
    return parser.parse_args(words)


def check_output(output: Path, folder: Path, inputs: Sequence[str]) -> None:
    """Raises UserError where `output` would replace what is read: an input, or a file of the model or its run.

    In their folders, CSV files are taken for earlier predictions.
    """
    run = folder.resolve()
    if (run.parent / "settings.yaml").is_file():  # the folder is the cnn/ of a run
        run = run.parent
    with contextlib.suppress(OSError):  # what cannot be looked at cannot be read or written, which is said there
        if output.is_dir() or not output.exists():
            return
        read = [Path(path) for path in inputs if Path(path).exists()]
        if any(output.samefile(path) for path in read):
            raise UserError(f"-o {output}: is what the images are read from; name another file")
        for path in (run, *read):
            if output.suffix != ".csv" and output.resolve().is_relative_to(path.resolve()):
                raise UserError(f"-o {output}: is a file of {path}, which would be lost; name another file")


def main(words: Sequence[str]) -> int:
    args = parse(words)
    check_output(args.output, args.folder, args.input)
    return launch(lambda _: predict(args), Settings())


if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main(sys.argv[1:]))
