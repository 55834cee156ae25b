"""Every option of a run: one typed field with its default, unit and scope.

Nothing here imports torch, so that `--help` and a mistyped flag answer at once.
"""

import contextlib
import dataclasses
import difflib
import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mnist_ddp.errors import UserError

_COUNTS = (
    "width",
    "epochs",
    "batch_size",
    "gradient_accumulation_steps",
    "num_processes",
    "patience",
    "keep_checkpoints",
)

# Settings that processes of one run may differ in: what belongs to a machine. Files are compared by their content.
OF_A_MACHINE = frozenset(
    [
        *("mnist_file_path", "val_file_path", "test_file_path", "label_names", "dataset", "cache_dir", "pt_path"),
        *("gpu", "num_processes", "master_addr", "port"),
    ]
)

# Settings that a resumed run may change: where it runs, how long it goes on, how it is spread over processes, and what
# is kept and shown of it. All others decide what is learned from which data.
MAY_CHANGE = OF_A_MACHINE | {
    *("epochs", "patience", "min_delta", "target_accuracy"),
    *("batch_size", "gradient_accumulation_steps", "timeout_seconds", "compile"),
    *("resume", "checkpoint_every_steps", "keep_checkpoints", "log_with", "push_to_hub", "profile"),
}


@dataclass(frozen=True)
class Settings:
    """Train a ConvNet on images in a CSV file, on one process or many, with the same numbers.

    `--config FILE.yaml` reads defaults from a file, for example the settings.yaml of an earlier run; flags override it.
    """

    # ---- data
    mnist_file_path: str = ""
    """CSV of labels and pixels, packed or not. Empty: the 10,000 MNIST digits that come with the project."""
    val_file_path: str = ""
    """CSV for validation. Empty: split off the main file."""
    test_file_path: str = ""
    """CSV for the final test. Empty: split off the main file."""
    dataset: str = ""
    """In place of files: what the package datasets loads. An id on the Hub, such as ylecun/mnist, or a folder of
    Parquet files, of class-named folders of images, or of save_to_disk. Its splits are used; missing ones are split off
    train."""
    image_column: str = ""
    """Column of the images in --dataset. Empty: found."""
    image_size: int = 0
    """Pixels to a side to which the images of --dataset are resized. 0: as they are."""
    label_column: str = ""
    """Column of the labels: a name, or, in a CSV, first or last. Empty: found."""
    label_names: str = ""
    """EMNIST mapping file (a label and its code point a line) that names the classes. Empty: the labels do."""
    transposed: bool = False
    """Images are stored column by column, as EMNIST does."""
    cache_dir: str = "~/.cache/mnist_ddp"
    """Folder that keeps parsed files, for the next start and for all processes of this machine. Empty: none."""
    val_fraction: float = 0.1
    """Share of the main file for validation, 0 to 1. Unused with --val_file_path."""
    test_fraction: float = 0.1
    """Share of the main file for the final test, 0 to 1. Unused with --test_file_path."""
    augment: bool = True
    """Shift, rotate, scale and shear the training images at random, anew in each epoch."""

    # ---- model and optimisation
    width: int = 12
    """Channels of the first convolution; the others follow from it."""
    epochs: int = 10000
    """Passes over the training images at most; early stopping is meant to end the run before."""
    batch_size: int = 256
    """Samples per process and step; the global batch is this x processes x gradient accumulation steps."""
    gradient_accumulation_steps: int = 1
    """Batches per process whose gradients are averaged before each optimizer step."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Update rule; sgd is Nesterov where momentum is above 0."""
    lr: float = 3e-2
    """Learning rate per optimizer step, for the global batch as it is: never scaled by the number of processes."""
    warmup_steps: int = 90
    """Optimizer steps over which the learning rate rises from 0, with their square. At most a quarter of those of a
    linear schedule; epochs that end within them take no patience."""
    schedule: Literal["plateau", "constant", "linear"] = "plateau"
    """The learning rate after the warm-up. plateau: x 0.3 after every 3 epochs in a row without improvement. linear:
    falls to 0 by the last of --epochs."""
    momentum: float = 0.9
    """Momentum of sgd, beta1 of adamw, 0 to 1."""
    weight_decay: float = 0.01
    """Decay of convolution and linear weights; biases and BatchNorm parameters are not decayed."""
    label_smoothing: float = 0.2
    """Share of each training target that is spread over all classes, 0 to 1."""
    ema_decay: float = 0.98
    """Share of the running average of the weights that each step keeps, 0 to 1; the average is what is evaluated and
    saved. 0: the weights themselves."""
    max_grad_norm: float = 0.0
    """Gradients are scaled down to this L2 norm over all parameters. 0: no clipping."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Number format of the forward pass. auto: what the launcher asked for, else bf16 where the hardware has it."""
    compile: bool = False
    """Compile the model with TorchInductor, through Accelerate: takes some 30 seconds at the start, and on CPUs a C++
    compiler; no faster on two cores."""

    # ---- when to stop
    monitor: Literal["accuracy", "loss", "none"] = "accuracy"
    """Validation value that decides which weights are best and when to stop. none: the last epoch's are kept, and
    patience stops no run."""
    patience: int = 5
    """Epochs without improvement before stopping."""
    min_delta: float = 0.0
    """An improvement of the monitored value counts if it is larger than this (accuracy as a fraction)."""
    target_accuracy: float = 0.0
    """Stop as soon as validation accuracy reaches this fraction. 0: no target."""

    # ---- the run
    pt_path: str = "pt/"
    """Run folder: settings, metrics, result, model, checkpoints."""
    resume: Literal["auto", "never"] = "auto"
    """What to do with a run folder that holds a run. auto: go on from its newest checkpoint. never: replace it."""
    checkpoint_every_steps: int = 0
    """Optimizer steps between checkpoints within an epoch; there is one after each epoch anyway. 0: none."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    seed: int = 1206
    """Seed of split, initial weights, order and augmentation; the same on every number of processes."""
    profile: bool = False
    """Record a few training steps of each process, as a trace and a table in the run folder."""
    log_with: Literal["tensorboard", "trackio", "wandb", "mlflow", "none"] = "tensorboard"
    """Experiment tracker, through Accelerate; all but tensorboard are packages of their own."""
    push_to_hub: str = ""
    """Repository on the Hugging Face Hub, such as me/digits, that gets the tested model. Empty: none."""

    # ---- processes
    gpu: str = ""
    """GPUs to use, comma-separated indices as nvidia-smi shows them. Empty: all; the CPU where there is none."""
    num_processes: int = 1
    """Processes that this program starts itself. Under torchrun or accelerate launch, the launcher decides."""
    master_addr: str = "localhost"
    """Address on which self-started processes meet."""
    port: int = 0
    """TCP port on which self-started processes meet. 0: any free one."""
    timeout_seconds: float = 600.0
    """Seconds after which a process that waits for the others, or is stuck, ends the run."""

    def __post_init__(self) -> None:
        """Raises UserError that names the flag of the first value out of its range."""
        split_off = [f"{name}_fraction" for name in ("val", "test") if not getattr(self, f"{name}_file_path")]
        for names, within, words in (
            (_COUNTS, lambda value: value >= 1, "1 or more"),
            (
                ("weight_decay", "warmup_steps", "max_grad_norm", "min_delta", "checkpoint_every_steps", "image_size"),
                lambda value: 0 <= value < math.inf,
                "0 or more",
            ),
            (("lr",), lambda value: 0 < value < math.inf, "above 0"),
            (("timeout_seconds",), lambda value: 0 < value <= 1e6, "above 0 and at most 1000000"),
            (("width",), lambda value: value <= 4096, "at most 4096"),
            (("num_processes",), lambda value: value <= 1024, "at most 1024"),
            (("momentum", "ema_decay", "label_smoothing"), lambda value: 0 <= value < 1, "at least 0 and below 1"),
            (split_off, lambda value: 0 < value < 1, "above 0 and below 1"),
            (("target_accuracy",), lambda value: 0 <= value <= 1, "between 0 and 1"),
            (("seed",), lambda value: 0 <= value < 2**63, "between 0 and 2^63 - 1"),
            (("port",), lambda value: 0 <= value <= 65535, "between 0 and 65535"),
        ):
            for name in names:
                if not within(getattr(self, name)):
                    raise UserError(f"--{name} must be {words}, got {getattr(self, name)}")
        if sum(getattr(self, name) for name in split_off) >= 1:
            raise UserError("--val_fraction and --test_fraction must add up to less than 1")
        files = [name for name in ("mnist_file_path", "val_file_path", "test_file_path") if getattr(self, name)]
        of_files = [*files, *(name for name in ("label_names", "transposed") if getattr(self, name))]
        of_datasets = [name for name in ("image_column", "image_size") if getattr(self, name)]
        if self.dataset and of_files:
            raise UserError(f"--{of_files[0]} is for CSV files and --dataset for others; give one of them")
        if of_datasets and not self.dataset:
            raise UserError(f"--{of_datasets[0]} needs --dataset")
        if self.gpu and not re.fullmatch(r"\d+(,\d+)*", self.gpu):
            raise UserError(f"--gpu must be comma-separated numbers such as 0,1, got {self.gpu!r}")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.push_to_hub):
            raise UserError(f"--push_to_hub must be a name such as me/digits, got {self.push_to_hub!r}")
        for field in dataclasses.fields(self):
            if "\0" in str(getattr(self, field.name)):
                raise UserError(f"--{field.name} must not hold a NUL character")
        if not self.pt_path:
            raise UserError("--pt_path must name a folder")


def parse_settings(args: Sequence[str]) -> Settings:
    """Settings from the command line, over those of `--config`, over the defaults.

    Raises:
        UserError: an unknown flag or key (with the nearest known name), a value of the wrong type or out of range.
        SystemExit: after `--help`.
    """
    flags, config_path = _take_config(args)
    default = Settings() if config_path is None else load_settings(config_path)
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            _check_name(flag[2:].split("=")[0].replace("-", "_"), "unknown flag --{name}", "--{name}")
    return _parse(flags, default)


def load_settings(path: str | Path) -> Settings:
    """Settings from a YAML mapping of field names to values.

    Raises:
        UserError: the file is missing or no mapping, holds an unknown key, or a value of wrong type or out of range.
    """
    import yaml

    try:
        # All values as text, and through the command line's own parser: YAML itself reads 1e-4 as text, no as a bool,
        # 010 as 8 and 1:30 as 90.
        values = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise UserError(f"--config {path}: expected lines such as 'lr: 0.003'")
    flags, kinds = [], {field.name: field.type for field in dataclasses.fields(Settings)}
    for name, value in values.items():
        _check_name(str(name), f"--config {path}: unknown key {{name}}", "{name}")
        if kinds[name] is bool:
            value = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(str(value).lower(), value)
        flags.append(f"--{name}={'' if value in ('null', '~') else value}")
    try:
        return _parse(flags, Settings())
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    defaults = dataclasses.asdict(Settings())
    return {name: value for name, value in dataclasses.asdict(settings).items() if value != defaults[name]}


def dump_settings(settings: Settings) -> str:
    """The settings as YAML that `--config` reads back equal."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)


def _take_config(args: Sequence[str]) -> tuple[list[str], str | None]:
    """Splits `--config FILE` off the other flags."""
    flags: list[str] = []
    path = None
    rest = iter(args)
    for arg in rest:
        if arg == "--config":
            path = next(rest, None)
            if path is None:
                raise UserError("--config needs a file name")
        elif arg.startswith("--config="):
            path = arg.removeprefix("--config=")
        else:
            flags.append(arg)
    return flags, path


def _check_name(name: str, complaint: str, suggestion: str) -> None:
    known = [field.name for field in dataclasses.fields(Settings)]
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {suggestion.format(name=nearest[0])}?" if nearest else "; --help lists all"
    raise UserError(complaint.format(name=name) + hint)


def _parse(flags: Sequence[str], default: Settings) -> Settings:
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def lower_case_bool(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        if info.type is not bool:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            instance_from_str=lambda words: {"true": True, "false": False}[words[0].lower()],
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
            choices=("true", "false", "True", "False"),
        )

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Settings,
                args=flags,
                default=default,
                prog=os.path.basename(sys.argv[0]),
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
                registry=registry,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UserError(_first_sentence(said.getvalue())) from None


def _first_sentence(box: str) -> str:
    """The message in the box that tyro draws around it, which reaches down to the first rule."""
    lines = []
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        if not text.strip("─╰╯"):
            break
        lines.append(text)
    return " ".join(lines).removeprefix("Error parsing Settings: ")
