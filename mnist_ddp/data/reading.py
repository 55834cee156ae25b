"""A file of labelled images -> ImageSet."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from mnist_ddp.data.cache import Stored, load_or_parse
from mnist_ddp.data.image_set import ImageSet, apart
from mnist_ddp.data.parsing import Contents, parse_csv
from mnist_ddp.errors import UserError

EMBEDDED_DIGITS = Path(__file__).resolve().parents[2] / "data" / "mnist_test.csv.gz"


def read_files(main_path: str, val_path: str = "", test_path: str = "", **options: Any) -> dict[str, ImageSet]:
    """The files of a run: "train" and, where they have files of their own, "validation" and "test".

    Args:
        main_path: empty for the embedded digits.
        val_path, test_path: empty for none.
        options: of `read_image_set`.

    Raises:
        UserError: a file cannot be used, see `read_image_set`, does not fit the main one, or holds its images alone.
    """
    main = read_image_set(main_path or EMBEDDED_DIGITS, **options)
    sets = {"train": main}
    for name, flag, path in (("validation", "--val_file_path", val_path), ("test", "--test_file_path", test_path)):
        if path:
            sets[name] = read_image_set(path, class_names=main.class_names, **options)
            (height, width), (expected_height, expected_width) = sets[name].images.shape[1:], main.images.shape[1:]
            if (height, width) != (expected_height, expected_width):
                raise UserError(
                    f"{path}: images of {height}x{width} pixels, but those of {main.source} are "
                    f"{expected_height}x{expected_width}"
                )
            sets[name] = apart(sets[name], main, f"{flag} {path}")
    return sets


def read_image_set(
    path: str | os.PathLike[str],
    *,
    label_column: str = "",
    transposed: bool = False,
    label_names: str = "",
    class_names: Sequence[str] | None = None,
    cache_dir: str = "",
    progress: bool = False,
) -> ImageSet:
    """The images and labels of a CSV file in any of the usual layouts.

    Args:
        path: the file; packed or not.
        label_column: a name in the header, or first or last. Empty: found.
        transposed: whether images are stored column by column, as in EMNIST.
        label_names: an EMNIST mapping file, "label code point" a line, that names the classes. Empty: their labels.
        class_names: the classes of another file, which the labels must be among. None: the labels found.
        cache_dir: where parsed files are kept for the next start and the other processes. Empty: nowhere.
        progress: whether to show a bar while parsing.

    Raises:
        UserError: the file cannot be read, has no known layout, has faults or no labels; or its labels are not among
            `class_names`, or all the same where that is None.
    """
    path = os.fspath(path)
    stored = read_table(path, label_column=label_column, transposed=transposed, cache_dir=cache_dir, progress=progress)
    if stored.labels is None:
        height, width = stored.images.shape[1:]
        raise UserError(
            f"{path}: has no labels, only {height * width} columns for {height}x{width} pixels; training needs labels, "
            "in a column of their own"
        )
    names = _rename(stored.class_names, label_names, path) if label_names else stored.class_names
    return labelled(stored, names, class_names, path)


def read_table(
    path: str | os.PathLike[str],
    *,
    label_column: str = "",
    transposed: bool = False,
    cache_dir: str = "",
    progress: bool = False,
) -> Stored:
    """The images of a CSV file, with labels where it has them: see `read_image_set`.

    Raises:
        UserError: the file cannot be read, has no known layout, or has faults.
    """
    path = os.fspath(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not os.path.isfile(path):
        folder = os.path.isdir(path)
        raise UserError(f"{path}: is {'a folder; give it to --dataset' if folder else 'no regular file'}")

    def parse(pixels: IO[bytes]) -> Contents:
        found = parse_csv(path, pixels, label_column=label_column, transposed=transposed, progress=progress)
        now = os.stat(path)
        if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise UserError(f"{path}: changed while it was read; start again when it is complete")
        return found

    key = {
        "path": os.path.realpath(path),
        "size": status.st_size,
        "mtime": status.st_mtime_ns,
        "label_column": label_column,
        "transposed": transposed,
    }
    return load_or_parse(parse, key, os.path.basename(path), cache_dir)


def _rename(labels: Sequence[str], mapping_path: str, path: str) -> tuple[str, ...]:
    """Names of `labels` by an EMNIST mapping: lines of a label and its code points, of which the first counts."""
    names = {}
    try:
        with open(mapping_path) as file:
            for row, line in enumerate(file, 1):
                numbers = line.split()
                if numbers and (len(numbers) < 2 or not all(number.isdecimal() for number in numbers)):
                    raise UserError(
                        f"--label_names {mapping_path}: row {row} is no label and code point: {line.strip()!r}"
                    )
                if numbers and numbers[0] in names:
                    raise UserError(f"--label_names {mapping_path}: row {row} names label {numbers[0]} again")
                if numbers:
                    names[numbers[0]] = chr(int(numbers[1]))
                    names[numbers[0]].encode()  # not half of a surrogate pair
    except UserError:
        raise
    except (OSError, ValueError, OverflowError) as error:  # from open, decoding and chr
        reason = getattr(error, "strerror", None) or "is no mapping of labels to code points"
        raise UserError(f"--label_names {mapping_path}: {reason}") from error
    for label in labels:
        if label not in names:
            raise UserError(f"--label_names {mapping_path}: has no label {label}, which {path} holds")
    chosen = tuple(names[label] for label in labels)
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--label_names {mapping_path}: gives two labels of {path} the same name")
    return chosen


def labelled(stored: Stored, names: Sequence[str], class_names: Sequence[str] | None, source: str) -> ImageSet:
    """An ImageSet of images that have labels.

    Args:
        stored: the images; `labels` are indices into `names`.
        names: of the classes.
        class_names: the classes of another set, which all labels must be among. None: `names`.
        source: for messages.

    Raises:
        UserError: a label is not among `class_names`; or all are the same, where that is None.
    """
    assert stored.labels is not None
    used = [names[label] for label in stored.labels.unique()]
    if class_names is None:
        if len(used) < 2:
            raise UserError(f"{source}: all labels are {used[0]}; training needs two classes; see --label_column")
        return ImageSet(stored.images, stored.labels, tuple(names), source, stored.notes)
    for name in used:
        if name not in class_names:
            known = ", ".join(class_names[:20])
            raise UserError(f"{source}: label {name} is not among the classes of the training images: {known}")
    indices = torch.tensor([class_names.index(name) if name in used else -1 for name in names])
    return ImageSet(stored.images, indices[stored.labels], tuple(class_names), source, stored.notes)
