"""What the package `datasets` loads, from the Hugging Face Hub or from a folder -> ImageSets."""

import dataclasses
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mnist_ddp.data.cache import load_or_parse
from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.layout import LABEL_NAME
from mnist_ddp.data.parsing import Contents
from mnist_ddp.data.reading import labelled
from mnist_ddp.errors import UserError

if TYPE_CHECKING:
    import datasets  # slow to import, and CSV files are read without it: imported where it is used

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_BATCH = 1024  # images decoded at a time


def read_dataset(
    id_or_path: str,
    *,
    image_column: str = "",
    label_column: str = "",
    image_size: int = 0,
    cache_dir: str = "",
    progress: bool = False,
) -> dict[str, ImageSet]:
    """The splits of a dataset: "train" and, where they are there and have labels, "validation" and "test".

    Args:
        id_or_path: an id on the Hub, such as ylecun/mnist; or a folder of Parquet files, of class-named folders of
            images, or of what `save_to_disk` wrote. A single split counts as train, whatever its name.
        image_column, label_column: names of columns. Empty: the only ones that can be meant.
        image_size: height and width in pixels to which all images are resized. 0: as they are, and all the same.
        cache_dir, progress: see `read_image_set`.

    Returns:
        Sets of the same image size and class names. Colour has become grey, what is transparent background.

    Raises:
        UserError: the dataset cannot be loaded, its columns cannot be told, or an image or a label cannot be used.
    """
    splits, notes = _choose_splits(_load(id_or_path, progress), id_or_path)
    image_column = _find_image_column(splits["train"], id_or_path, image_column)
    label_column = _find_label_column(splits["train"], id_or_path, label_column)
    sets: dict[str, ImageSet] = {}
    for name, split in splits.items():
        source = f"{id_or_path} ({name})"
        for column in (image_column, label_column):
            if column not in split.column_names:
                raise UserError(f"{source}: has no column {column}, which train has")
        labels, class_names = _labels(split, label_column, source)
        if labels is None and sets:
            notes.append(f"{source}: has no labels and is left out")
            continue
        if labels is None:
            raise UserError(f"{source}: column {label_column} holds no labels; training needs them")
        reader = _SplitReader(
            source,
            split.select_columns(image_column),
            labels,
            class_names,
            size=_size(sets["train"]) if sets else (image_size, image_size) if image_size else None,
            resize=image_size > 0,
            progress=progress,
        )
        key = {
            "dataset": os.path.realpath(id_or_path) if os.path.isdir(id_or_path) else id_or_path,
            "fingerprint": split._fingerprint,  # of all that the split holds
            "columns": [image_column, label_column],
            "size": reader.size,
            "resize": reader.resize,
        }
        stored = load_or_parse(reader.write, key, f"{os.path.basename(os.path.normpath(id_or_path))}-{name}", cache_dir)
        sets[name] = labelled(stored, class_names, sets["train"].class_names if sets else None, source)
    sets["train"] = dataclasses.replace(sets["train"], notes=(*sets["train"].notes, *notes))
    return sets


def _load(id_or_path: str, progress: bool) -> "Mapping[str, datasets.Dataset]":
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--dataset {id_or_path}: needs the package datasets (pip install datasets); a CSV file does not"
        ) from error
    from huggingface_hub.utils import logging

    if not progress:
        datasets.disable_progress_bars()
    logging.set_verbosity_error()  # one line of ours instead of one for each attempt to reach the Hub
    path = os.path.expanduser(id_or_path)
    if os.path.isfile(path):
        raise UserError(f"--dataset {id_or_path}: is a file; --dataset takes a folder, --mnist_file_path a CSV file")
    looks_like_a_path = id_or_path.count("/") > 1 or id_or_path.startswith((".", "/", "~")) or id_or_path.endswith("/")
    if not os.path.isdir(path) and looks_like_a_path:
        raise UserError(f"--dataset {id_or_path}: no such folder, nor an id on the Hub such as ylecun/mnist")
    try:
        if os.path.exists(os.path.join(path, "dataset_dict.json")):
            return dict(datasets.DatasetDict.load_from_disk(path))
        if os.path.exists(os.path.join(path, "state.json")):
            return {"train": datasets.Dataset.load_from_disk(path)}
        return dict(datasets.load_dataset(path))
    except ConnectionError as error:
        raise UserError(
            f"--dataset {id_or_path}: no such folder, and the Hub cannot be reached; a folder of Parquet files, of "
            "class-named folders of images or of save_to_disk would do, or a CSV file"
        ) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"--dataset {id_or_path}: no such folder, and no dataset on the Hub that may be read without a login"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"--dataset {id_or_path}: {' '.join(str(error).split())[:300]}") from error


def _choose_splits(
    splits: "Mapping[str, datasets.Dataset]", id_or_path: str
) -> "tuple[dict[str, datasets.Dataset], list[str]]":
    """The splits under the names train, validation and test, in this order; and what is to be said about others."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}, []
    chosen = {name: splits[known] for name, names in _SPLIT_NAMES.items() for known in names[::-1] if known in splits}
    if "train" not in chosen:
        raise UserError(f"--dataset {id_or_path}: has no split named train, but {', '.join(splits)}")
    others = [known for known, split in splits.items() if all(split is not other for other in chosen.values())]
    return chosen, [f"{id_or_path}: split {known} is not used" for known in others]


def _find_image_column(split: "datasets.Dataset", id_or_path: str, asked: str) -> str:
    import datasets

    images = [name for name, feature in split.features.items() if isinstance(feature, datasets.Image)]
    return _pick(asked, images, images, "--image_column", split, id_or_path)


def _find_label_column(split: "datasets.Dataset", id_or_path: str, asked: str) -> str:
    import datasets

    usable = [
        name
        for name, feature in split.features.items()
        if isinstance(feature, (datasets.ClassLabel, datasets.Value)) and re.search("int|string", feature.dtype)
    ]
    classes = [name for name in usable if isinstance(split.features[name], datasets.ClassLabel)]
    named = [name for name in usable if LABEL_NAME.fullmatch(name)]
    likely = named if len(named) == 1 else classes or usable
    return _pick(asked, likely, usable, "--label_column", split, id_or_path)


def _pick(
    asked: str, likely: list[str], usable: list[str], flag: str, split: "datasets.Dataset", id_or_path: str
) -> str:
    if asked in usable:
        return asked
    if not asked and len(likely) == 1:
        return likely[0]
    columns = ", ".join(split.column_names)
    if asked:
        raise UserError(f"--dataset {id_or_path}: {flag} {asked} cannot be used; the columns are {columns}")
    what = "which column to use" if likely else "no column to use"
    raise UserError(f"--dataset {id_or_path}: {what}? name it with {flag}; the columns are {columns}")


def _labels(split: "datasets.Dataset", column: str, source: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """(N,) indices and the classes that they point to; no indices where no image has a label."""
    values = split.select_columns(column).with_format("arrow")[:][column].to_pylist()
    names = getattr(split.features[column], "names", None)
    # Test splits often mark labels that are kept secret: -1 of a ClassLabel, or nothing.
    missing = [row for row, value in enumerate(values) if value is None or value == "" or (names and value < 0)]
    if len(missing) == len(values):
        return None, ()
    if missing:
        raise UserError(f"{source}: {len(missing)} images have no label, the first of them row {missing[0]}, from 0")
    if names is not None:
        return np.array(values, np.int64), tuple(names)
    classes, indices = np.unique(np.array(values), return_inverse=True)
    return indices, tuple(map(str, classes))


def _size(image_set: ImageSet) -> tuple[int, int]:
    _, height, width = image_set.images.shape
    return height, width


@dataclasses.dataclass(frozen=True)
class _SplitReader:
    """Decodes the images of a split.

    Attributes:
        source: the split, for messages.
        images: a dataset with one column, of images.
        labels: (N,) indices into `class_names`.
        class_names: in label order.
        size: height and width in pixels of all images; None for those of the first.
        resize: whether other sizes are resized instead of refused.
        progress: whether to show a bar.
    """

    source: str
    images: "datasets.Dataset"
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    size: tuple[int, int] | None
    resize: bool
    progress: bool

    def write(self, pixels: IO[bytes]) -> Contents:
        """Writes N x H x W bytes, 0..255.

        Raises:
            UserError: an image cannot be decoded, or is of another size.
        """
        import datasets
        from tqdm import tqdm

        (column,) = self.images.column_names
        size = self.size
        encoded = self.images.cast_column(column, datasets.Image(decode=False))
        # Threads: PIL releases the lock while it decodes, and none of them has to import anything.
        with (
            ThreadPoolExecutor() as pool,
            tqdm(desc=self.source, total=len(encoded), unit=" images", disable=not self.progress) as bar,
        ):
            for first, batch in zip(range(0, len(encoded), _BATCH), encoded.iter(_BATCH), strict=True):
                for row, image in enumerate(pool.map(self._decode, batch[column]), first):
                    if isinstance(image, Exception):
                        raise UserError(f"{self.source}: row {row}, from 0: not an image: {image}") from image
                    size = size or image.shape
                    if image.shape != size:
                        raise UserError(
                            f"{self.source}: row {row}, from 0: {image.shape[1]}x{image.shape[0]} pixels instead of "
                            f"{size[1]}x{size[0]}; --image_size N resizes all to NxN"
                        )
                    pixels.write(image.data)
                bar.update(len(batch[column]))
        assert size is not None, "_labels refuses a split without images"
        return Contents(*size, self.labels, self.class_names, ())

    def _decode(self, encoded: dict[str, Any] | None) -> NDArray[np.uint8] | Exception:
        """(H, W), or what is wrong with the image."""
        import datasets
        from PIL import Image

        try:
            image = datasets.Image().decode_example(encoded)
        except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError) as error:
            return error
        if image.mode.startswith("I;16"):  # convert would clip it
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
        image = image.convert("L")
        if self.resize and self.size is not None:
            image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        return np.asarray(image)
