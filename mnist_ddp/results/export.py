"""A trained model as ONNX, checked in onnxruntime before the file is kept.

    python -m mnist_ddp.results.export pt/ -o cnn.onnx

In: "images", (N, H, W) uint8, 0 is background. Out: "probabilities", (N, classes) float32. Normalisation is inside, the
class names are in the file's metadata under "class_names", as a JSON list.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnist_ddp.data.reading import EMBEDDED_DIGITS, read_table
from mnist_ddp.errors import UserError, exit_with_one_line
from mnist_ddp.files import write_whole
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.results.predict import load_model

REQUIREMENTS = "requirements-export.txt"
_CHECKED = 256  # digits
_TOLERANCE = 1e-5  # of a probability


class Probabilities(nn.Module):
    """The model with its softmax: (N, H, W) uint8 to (N, classes) float32."""

    def __init__(self, model: ConvNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).softmax(dim=1)


def export(model: ConvNet, path: Path) -> float:
    """Writes `model` as ONNX.

    Returns:
        The largest difference of a probability in onnxruntime from the model's own, over 256 digits.

    Raises:
        UserError: a package is missing, or the file cannot be written.
        RuntimeError: the difference is more than 1e-5; nothing is written.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise UserError(f"export needs the package {error.name}: pip install -r {REQUIREMENTS}") from error
    module = Probabilities(model.eval())
    digits = some_digits(model.image_size)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about its own parts
        program = torch.onnx.export(
            module,
            (digits[:2],),
            dynamo=True,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes=({0: torch.export.Dim("N", min=1)},),
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = "class_names", json.dumps(model.class_names)
    content = proto.SerializeToString()

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        expected = module(digits)
    (found,) = session.run(["probabilities"], {"images": digits.numpy()})
    difference = float((torch.from_numpy(found) - expected).abs().max())
    if not difference <= _TOLERANCE:  # NaN is more than any number
        raise RuntimeError(
            f"onnxruntime differs from the model by {difference:.1e} on {_CHECKED} digits; nothing was written"
        )
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"-o {path}: cannot be written: {error.strerror}") from error
    return difference


def some_digits(size: Sequence[int]) -> Tensor:
    """(256, H, W) uint8: the first of the embedded digits, resized to `size`."""
    images = read_table(EMBEDDED_DIGITS).images[:_CHECKED]
    if tuple(images.shape[1:]) == tuple(size):
        return images
    resized = F.interpolate(images.float().unsqueeze(1), tuple(size), mode="bilinear", antialias=True)
    return resized.squeeze(1).round().clamp(0, 255).to(torch.uint8)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m mnist_ddp.results.export",
        description="Write a trained model as ONNX: uint8 pixels to probabilities.",
    )
    parser.add_argument("folder", type=Path, help="run folder, such as pt/, or a folder with a model")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.onnx", help="file to write")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    args = parse(words)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    difference = export(load_model(args.folder), args.output)
    print(f"{args.output}: differs from the model by {difference:.1e} at most on {_CHECKED} digits")
    return 0


if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main(sys.argv[1:]))
