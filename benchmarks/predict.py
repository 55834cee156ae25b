"""How long predictions take, beside an evaluation of the same images.

    python -m benchmarks.predict pt/ mnist_train.csv    # a few minutes for 60,000 rows on two cores
    python -m benchmarks.predict pt/                    # the embedded digits
    python -m benchmarks.predict pt/ --quick            # a smoke test: one round of them

Reading is not counted: both start from the images in memory. An evaluation ends with its sums, a prediction with the
rows written to a CSV file. They take turns; prints the median of each and of the ratios of each pair,
and writes all to a JSON file.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Splits, Subset, make_loaders
from mnist_ddp.data.reading import EMBEDDED_DIGITS, read_image_set
from mnist_ddp.distributed import gather_rows, start_accelerator
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.results.predict import forward, load_model, write
from mnist_ddp.settings import Settings
from mnist_ddp.training.evaluation import evaluate


def seconds_of_evaluation(accelerator: Accelerator, model: ConvNet, images: ImageSet) -> float:
    everything = Subset(images, torch.arange(len(images)))
    loaders = make_loaders(
        Splits(everything, everything, everything),
        accelerator.device,
        seed=0,
        augment=False,
        batch_size=Settings.batch_size,
        processes=1,
        accumulation_steps=1,
    )
    loader = accelerator.prepare(loaders.test)
    start = time.perf_counter()
    evaluate(accelerator, model, loader, len(model.class_names))
    return time.perf_counter() - start


def seconds_of_prediction(accelerator: Accelerator, model: ConvNet, images: Tensor) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        predicted, probabilities = (gather_rows(rows) for rows in forward(accelerator, model, images))
        write(Path(folder) / "out.csv", "plain", None, model.class_names, predicted, probabilities)
        return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run folder with a model")
    parser.add_argument("file", nargs="?", default=EMBEDDED_DIGITS, help="CSV file of labelled images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", default="benchmark_predict.json", help="where to write the figures")
    args = parser.parse_args()
    accelerator = start_accelerator(
        mixed_precision="auto", gradient_accumulation_steps=1, timeout_seconds=600, log_with="none", project_dir=""
    )
    model = load_model(args.folder)
    images = read_image_set(args.file, class_names=model.class_names)
    evaluations, predictions = [], []
    rounds = 1 if args.quick else args.rounds
    for round_ in range(rounds + 1):
        predicted = seconds_of_prediction(accelerator, model, images.images)
        evaluated = seconds_of_evaluation(accelerator, model, images)
        if round_ > 0:  # the first warms up
            predictions.append(predicted)
            evaluations.append(evaluated)
    ratios = [predicted / evaluated for predicted, evaluated in zip(predictions, evaluations, strict=True)]
    print(
        f"{len(images):,} images: evaluation {statistics.median(evaluations):.2f} s, prediction "
        f"{statistics.median(predictions):.2f} s; ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
    )
    figures = {"images": len(images), "evaluation": evaluations, "prediction": predictions, "ratios": ratios}
    Path(args.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
