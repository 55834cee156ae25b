"""Predictions are the model's, one for each image and in order, whatever they come from and on however many processes.

python -m pytest tests/results/test_predict.py
"""

import csv
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import Finished
from launching import run
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from mnist_ddp.data.reading import read_image_set, read_table
from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.results.predict import (
    Inputs,
    check_output,
    image_files,
    load_model,
    main,
    predict,
    read_image_files,
    read_inputs,
    write,
)


def arguments(folder: Path, *inputs: Path, **others: Any) -> Namespace:
    defaults = {
        "output": folder / "out.csv",
        "format": "plain",
        "label_column": "",
        "transposed": False,
        "split": "",
        "mixed_precision": "no",
        "cache_dir": "",
    }
    return Namespace(folder=folder, input=[str(path) for path in inputs], **defaults | others)


def rows_of(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for 8x8 images of three classes, and a table of 7 of them without labels."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    ConvNet(("a", "b", "c"), (8, 8), width=4, mean=0.13, std=0.31).eval().save_pretrained(folder)
    pixels = torch.randint(256, (7, 64), generator=torch.Generator().manual_seed(0))
    (folder / "images.csv").write_text("".join(",".join(map(str, row.tolist())) + "\n" for row in pixels))
    return folder


def images_of(model_folder: Path) -> torch.Tensor:
    return read_table(model_folder / "images.csv").images


def test_the_command_predicts_a_table_with_labels(finished: Finished, small_csv: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    command = f"python -m mnist_ddp.results.predict {finished.folder} {small_csv} -o {output} --mixed_precision no"
    ended = run(command)
    assert ended.status == 0, ended
    assert ended.stderr == ""
    digits = read_image_set(small_csv)
    with torch.inference_mode():
        best = ConvNet.from_pretrained(finished.folder / "cnn").eval()(digits.images).softmax(1).max(1)
    header, *rows = rows_of(output)
    assert header == ["row", "label", "probability"]
    assert [int(row) for row, _, _ in rows] == [*range(1, 401)]
    assert [label for _, label, _ in rows] == [str(index) for index in best.indices.tolist()]
    assert [float(share) for _, _, share in rows] == pytest.approx(best.values.tolist(), abs=2e-6)
    right = int((best.indices == digits.labels).sum())
    assert ended.stdout == f"400 predictions in {output}; accuracy {right / 400:.2%} ({right} right)\n"


def predict_together(arguments: Namespace) -> int:
    return predict(arguments)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_number_of_processes_writes_the_same_rows(model_folder: Path, tmp_path: Path, world_size: int) -> None:
    output = tmp_path / "out.csv"
    asked = arguments(model_folder, model_folder / "images.csv", output=output)
    assert run_ranks(predict_together, world_size, asked) == [0] * world_size
    with torch.inference_mode():
        best = ConvNet.from_pretrained(model_folder).eval()(images_of(model_folder)).softmax(1).max(1)
    expected = [[str(row), "abc"[index]] for row, index in enumerate(best.indices.tolist(), 1)]
    _, *rows = rows_of(output)
    assert [row[:2] for row in rows] == expected
    assert [float(share) for _, _, share in rows] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_fewer_images_than_processes(model_folder: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "one.png")
    asked = arguments(model_folder, tmp_path / "one.png", output=tmp_path / "out.csv")
    run_ranks(predict_together, 3, asked)
    assert [row[0] for row in rows_of(tmp_path / "out.csv")] == ["file", str(tmp_path / "one.png")]


def test_a_mistake_on_all_processes_is_told_on_all(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"UserError: .*none.csv: No such file"):
        run_ranks(predict_together, 2, arguments(model_folder, tmp_path / "none.csv"))


def test_a_model_that_was_trained_with_synchronised_batchnorm_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = ConvNet("0123456789", (28, 28), width=4, mean=0.13, std=0.31)
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    images = torch.randint(256, (5, 28, 28), dtype=torch.uint8)
    expected = plain.eval()(images)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert any(isinstance(layer, nn.SyncBatchNorm) for layer in converted.modules())
    converted.save_pretrained(tmp_path / "cnn")
    assert torch.equal(load_model(tmp_path).eval()(images), expected)


# ---- pictures


def stroke(size: int = 8) -> NDArray[np.uint8]:
    """A bright stroke on black, (size, size)."""
    image = Image.new("L", (size, size))
    ImageDraw.Draw(image).line((size // 2, size // 8, size // 2, size - size // 4), fill=255, width=size // 6 or 1)
    return np.asarray(image)


def read(*paths: Path, mean: float = 0.13, size: int = 8) -> Inputs:
    return read_image_files(paths, ConvNet("0123456789", (size, size), width=4, mean=mean, std=0.31))


def test_grey_colour_and_jpeg_files_are_read(tmp_path: Path) -> None:
    grey = stroke()
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).convert("RGB").save(tmp_path / "colour.png")
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(grey).save(tmp_path / "photo.jpg", quality=100)
    found = read(*(tmp_path / name for name in ("grey.png", "colour.png", "palette.png", "deep.png", "photo.jpg")))
    assert found.images.dtype == torch.uint8
    for image in found.images[:4]:
        assert (image.numpy() == grey).all()
    assert np.abs(found.images[4].numpy().astype(int) - grey).max() < 10
    assert found.notes == ()


def test_dark_on_light_is_inverted_and_said(tmp_path: Path) -> None:
    Image.fromarray(stroke()).save(tmp_path / "a.png")
    Image.fromarray(255 - stroke()).save(tmp_path / "b.png")
    found = read(tmp_path / "a.png", tmp_path / "b.png")
    assert torch.equal(found.images[0], found.images[1])
    assert found.notes == (
        f"{tmp_path / 'b.png'} is dark on light, unlike the images that the model was trained on; inverted",
    )
    # A model that was trained on dark ink sees dark ink.
    other = read(tmp_path / "a.png", tmp_path / "b.png", mean=0.87)
    assert torch.equal(other.images, 255 - found.images)
    assert "a.png is light on dark" in other.notes[0]


@pytest.mark.parametrize("ink", ["black", "white"])
def test_what_is_transparent_is_background(tmp_path: Path, ink: str) -> None:
    layer = Image.merge("RGBA", [*Image.new("RGB", (8, 8), ink).split(), Image.fromarray(stroke())])
    layer.save(tmp_path / "ink.png")
    assert (read(tmp_path / "ink.png").images[0].numpy() == stroke()).all()


def test_another_size_keeps_its_proportions(tmp_path: Path) -> None:
    """A square in an image twice as high as wide stays a square, with background at both sides."""
    tall = np.full((80, 40), 255, np.uint8)
    tall[20:60] = 0
    tall[20:60, :2] = tall[20:60, -2:] = 255
    Image.fromarray(tall).save(tmp_path / "tall.png")
    (image,) = read(tmp_path / "tall.png").images
    ink = image > 127
    rows, columns = ink.any(1).sum(), ink.any(0).sum()
    assert (rows, columns) == (4, 4)
    assert ink[:, :2].sum() == ink[:, -2:].sum() == 0


def test_a_photo_is_turned_as_its_phone_was_held(tmp_path: Path) -> None:
    upright = Image.fromarray(stroke(64))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", quality=100, exif=exif)
    upright.save(tmp_path / "upright.jpg", quality=100)
    turned, straight = read(tmp_path / "turned.jpg", tmp_path / "upright.jpg", size=28).images
    assert np.abs(turned.numpy().astype(int) - straight.numpy()).max() < 10


def test_files_of_a_folder_come_by_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.jpeg", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in image_files([tmp_path])] == ["a.JPG", "b.png", "c.jpeg"]
    assert image_files([tmp_path / "c.jpeg", tmp_path / "b.png"]) == [tmp_path / "c.jpeg", tmp_path / "b.png"]
    with pytest.raises(UserError, match=r"notes.txt: is no PNG or JPEG"):
        image_files([tmp_path / "b.png", tmp_path / "notes.txt"])


def test_a_broken_picture_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UserError, match=r"broken.png: not an image"):
        read(tmp_path / "broken.png")


# ---- other inputs


def test_a_folder_of_classes_is_a_dataset(model_folder: Path, tmp_path: Path) -> None:
    for name, value in (("c", 10), ("a", 200), ("b", 90)):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(np.full((12, 12), value, np.uint8)).save(tmp_path / "images" / name / f"{name}.png")
    found = read_inputs(arguments(model_folder, tmp_path / "images"), load_model(model_folder))
    assert found.images.shape == (3, 8, 8)
    assert found.labels is not None
    assert sorted(zip(found.labels.tolist(), found.images[:, 0, 0].tolist(), strict=True)) == [
        (0, 200),
        (1, 90),
        (2, 10),
    ]


def test_a_table_of_inverted_images_is_a_note(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(model_folder)  # of dark images
    for value, notes in (
        (40, ()),
        (
            215,
            (
                f"{tmp_path / '215.csv'}: the images are mostly light, those that the model was "
                "trained on mostly dark; if they are inverted, predictions are wrong: subtract the pixels from 255",
            ),
        ),
    ):
        (tmp_path / f"{value}.csv").write_text(f"{','.join([str(value)] * 64)}\n" * 12)
        assert read_inputs(arguments(model_folder, tmp_path / f"{value}.csv"), model).notes == notes


def test_labels_that_the_model_does_not_know_are_a_note(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("".join(f"{name},{','.join(['0'] * 64)}\n" for name in ("a", "z")))
    found = read_inputs(arguments(model_folder, tmp_path / "other.csv"), load_model(model_folder))
    assert found.labels is None
    assert found.notes[-1] == "label z is not among the model's classes, so accuracy is not computed"


def test_labels_count_by_their_names(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("".join(f"{name},{','.join(['0'] * 64)}\n" for name in ("c", "b", "c")))
    found = read_inputs(arguments(model_folder, tmp_path / "some.csv"), load_model(model_folder))
    assert found.labels is not None
    assert found.labels.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["square.csv"], r"square.csv: images of 3x3 pixels, but the model was trained on 8x8"),
        (["none.csv"], r"none.csv: No such file"),
        (["square.csv", "none.csv"], r"none.csv: only PNG and JPEG files can be several"),
        (["a/b/c"], r"^\S*a/b/c: no such folder, nor an id on the Hub"),
    ],
)
def test_a_slip_is_one_line(model_folder: Path, tmp_path: Path, inputs: list[str], message: str) -> None:
    (tmp_path / "square.csv").write_text("1,2,3,4,5,6,7,8,9\n" * 2)
    with pytest.raises(UserError, match=message):
        read_inputs(arguments(model_folder, *(tmp_path / name for name in inputs)), load_model(model_folder))


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        load_model(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes()[:-20])
    with pytest.raises(UserError, match="the model cannot be loaded"):
        load_model(tmp_path)


def test_a_configuration_that_lacks_a_value_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    whole = json.loads((model_folder / "config.json").read_text())
    for name in whole:
        part = {key: value for key, value in whole.items() if key != name}
        (tmp_path / "config.json").write_text(json.dumps(part))
        with pytest.raises(UserError, match=rf"the model cannot be loaded: .*'{name}'"):
            load_model(tmp_path)


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    """They are of another network. huggingface_hub leaves the layer at random, and says nothing."""
    ConvNet("0123456789", (28, 28), width=2, mean=0.13, std=0.31).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if ".3." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"the model cannot be loaded: .*features\.3\.0\.weight"):
        load_model(tmp_path)


# ---- output


def test_kaggle_gets_its_two_columns(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", "kaggle", None, ["x", "y"], torch.tensor([1, 0]), torch.tensor([0.5, 0.6]))
    assert (tmp_path / "out.csv").read_text() == "ImageId,Label\n1,y\n2,x\n"


def test_names_are_quoted_where_they_must_be(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", "plain", ["a,b.png"], ['"'], torch.tensor([0]), torch.tensor([1.0]))
    assert rows_of(tmp_path / "out.csv") == [["file", "label", "probability"], ["a,b.png", '"', "1.000000"]]


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"-o .*out.csv: cannot be written: No such file or directory"):
        write(tmp_path / "none" / "out.csv", "plain", None, ["x"], torch.tensor([0]), torch.tensor([1.0]))


def test_nothing_that_is_read_is_replaced(model_folder: Path, tmp_path: Path) -> None:
    digits, link = tmp_path / "digits.csv", tmp_path / "link.csv"
    digits.write_text("0,1,2,3,4\n")
    link.symlink_to(digits)
    for output in (digits, link):
        with pytest.raises(UserError, match=r"^-o \S+: is what the images are read from"):
            main([str(model_folder), str(digits), "-o", str(output)])
    with pytest.raises(UserError, match=r"^-o \S+config.json: is a file of \S+, which would be lost"):
        main([str(model_folder), str(digits), "-o", str(model_folder / "config.json")])
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "cnn")
    (run / "settings.yaml").touch()
    with pytest.raises(UserError, match=r"^-o \S+settings.yaml: is a file of \S+run, which would be lost"):
        main([str(run / "cnn"), str(digits), "-o", str(run / "settings.yaml")])
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "a.png").touch()
    with pytest.raises(UserError, match=r"^-o \S+a.png: is a file of \S+scans, which would be lost"):
        main([str(model_folder), str(tmp_path / "scans"), "-o", str(tmp_path / "scans" / "a.png")])
    check_output(tmp_path / ("x" * 300), tmp_path, [str(digits)])  # too long a name: writing it says so
    check_output(tmp_path / "new.csv", tmp_path, [str(digits)])
    check_output(link, tmp_path, ["ylecun/mnist"])  # predictions of before, in the run folder
