"""The README, CONTRIBUTING.md and the requirements say what is so.

python -m pytest tests/test_readme.py
"""

import argparse
import ast
import itertools
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from accelerate.commands.config import get_config_parser
from accelerate.commands.launch import launch_command_parser
from launching import ROOT
from torch.distributed.run import get_args_parser

from mnist_ddp.check.command import parse
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.settings import Settings, parse_settings

README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "data/README.md", "docs/launching.md", "docs/machines.md")
# What a command in a document starts with, where it stands in a line of text or in a table.
PROGRAMS = ("python", "torchrun", "accelerate", "pip", "bash", "tensorboard")
# What the name of a package on the index is, where it differs from the module's.
PACKAGES = {"yaml": "PyYAML", "PIL": "pillow", "kubeflow_trainer_api": "kubeflow-trainer-api"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands() -> list[str]:
    """Each command of the documents once, without what follows a #."""
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        lines = [
            line.split("  #")[0] for block in blocks(text, "bash") for line in block.splitlines() if line[0] != "#"
        ]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        lines += re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", prose)
        found += [part.strip() for line in lines for part in line.split("&&")]
    return list(dict.fromkeys(found))


def check_files(*paths: str | None) -> None:
    for path in paths:
        assert path is None or (ROOT / path).exists(), f"{path} does not exist"


def check_script(path: str, flags: list[str]) -> None:
    if path == "mnist_ddp.check":  # after -m
        parse(flags)
        return
    check_files(path)
    if path == "docs/by_hand.py":
        assert flags == []
        return
    assert path == "train_accel.py"
    if flags == ["--help"]:
        return
    parse_settings(flags)  # raises UserError at an unknown flag, and at a missing --config file


def check_results(module: str, flags: list[str]) -> None:
    """With the module's own parser; a slip would end this process."""
    import_module(module).parse(flags)


def check(command: str, parser: argparse.ArgumentParser) -> None:
    """Parses a launcher's command with the launcher's own parser, and the script's flags with the script's."""
    known = parser.parse_args(shlex.split(command))
    check_files(getattr(known, "config_file", None))
    assert bool(known.module) == (known.training_script == "mnist_ddp.check")
    check_script(known.training_script, known.training_script_args)


@pytest.mark.parametrize("command", commands())
def test_every_command_names_files_and_flags_that_exist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["accelerate", "launch", *rest]:
            check(shlex.join(rest), launch_command_parser())
        case ["accelerate", "config", *rest]:
            get_config_parser().parse_args(rest)
        case ["torchrun", *flags, "-m", "mnist_ddp.results.predict" as module, folder, input_, "-o", output]:
            get_args_parser().parse_args([*flags, "-m", module])
            check_results(module, [folder, input_, "-o", output])
        case ["torchrun", *rest]:
            check(shlex.join(rest), get_args_parser())
        case ["python", "-m", "pytest", *files]:
            check_files(*files)
        case ["python", "-m", module, *rest] if module.startswith("mnist_ddp.results."):
            check_results(module, rest)
        case ["python", "docs/picture.py", *_]:
            check_files("docs/picture.py")
        case ["python", "-m", module, *flags] if module.startswith("benchmarks."):
            check_files(f"{module.replace('.', '/')}.py")
        case ["python", "-m", module, *flags]:
            check_script(module, flags)
        case ["sbatch", file] | ["kubectl", "create", "-f", file]:
            check_files(file)
        case ["python", script, *flags]:
            check_script(script, flags)
        case ["pip", "install", "-r", file] | ["bash", file]:
            check_files(file)
        case ["apt-get", "install", package]:
            assert re.search(rf"apt-get install .*\b{package}\b", (ROOT / ".ci" / "run").read_text())
        case ["pip", "install", pin, "--index-url", _]:
            assert pin in requirements("requirements.txt")
        case ["python3", "-m", "venv", _] | ["source", ".venv/bin/activate"] | ["tensorboard", "--logdir", _]:
            pass
        case ["ruff", "check", "."] | ["ruff", "format", "--check", "."] | ["mypy"]:
            assert shlex.join(words) in (ROOT / ".ci" / "run").read_text().splitlines()
        case ["echo", digest_and_file, "|", "sha256sum", "-c"]:
            check_files(digest_and_file.split()[1])
        case _:
            pytest.fail(f"this test does not know how to check: {command}")


def test_the_documents_hold_the_commands_of_the_quick_start() -> None:
    # Also shows that `commands` finds anything at all.
    assert {
        "pip install -r requirements.txt",
        "accelerate launch --config_file accelerate_config.yaml train_accel.py",
        "pip install -r requirements-dev.txt",
        "python -m pytest",
        "accelerate launch --cpu --num_processes 2 train_accel.py",
    } <= set(commands())


def expected_rows() -> list[str]:
    """The README's row for each setting: its flag, default and choices, and the text that --help shows."""
    fields = next(
        node
        for node in ast.parse((ROOT / "mnist_ddp" / "settings.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ).body
    hints, default, rows = get_type_hints(Settings), Settings(), []
    for field, text in itertools.pairwise(fields):
        if not isinstance(field, ast.AnnAssign):
            continue
        assert isinstance(field.target, ast.Name)
        assert isinstance(text, ast.Expr), f"{field.target.id} has no docstring"
        assert isinstance(text.value, ast.Constant)
        assert isinstance(text.value.value, str)
        name, hint = field.target.id, hints[field.target.id]
        value = getattr(default, name)
        shown = f"`{str(value).lower() if hint is bool else value}`" if value != "" else "empty"
        if get_origin(hint) is Literal:
            shown += f" (or {', '.join(f'`{choice}`' for choice in get_args(hint) if choice != value)})"
        rows.append(f"| `--{name}` | {shown} | {' '.join(text.value.value.split())} |")
    return rows


def test_the_settings_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `--.*$", README, re.M)
    assert rows == expected_rows()


def test_links_lead_to_files() -> None:
    for name in DOCUMENTS:
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
            if "://" in target:
                continue
            file, _, heading = target.partition("#")
            document = (ROOT / name).parent / file if file else ROOT / name
            assert document.exists(), f"{name} links to {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
                assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ConvNet("0123456789", (28, 28), width=4, mean=0.13, std=0.31).save_pretrained("pt/cnn")
    (example,) = blocks(README, "python")
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["probabilities"].shape == (1, 10)  # type: ignore[attr-defined]


def requirements(file: str) -> set[str]:
    return {line.strip() for line in (ROOT / file).read_text().splitlines() if line.strip() and line[0] not in "#-"}


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (("requirements.txt", "requirements-export.txt"), ("train_accel.py", "mnist_ddp")),
        (("requirements.txt", "requirements-dev.txt", "requirements-export.txt"), ("tests",)),
    ],
)
def test_every_package_that_is_imported_is_pinned(files: tuple[str, ...], folders: tuple[str, ...]) -> None:
    pins = set.union(*map(requirements, files))
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), pins
    sources = [path for folder in folders for path in [ROOT / folder, *(ROOT / folder).rglob("*.py")] if path.is_file()]
    ours = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"mnist_ddp", "train_accel", "benchmarks"}
    imported = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    others = imported - sys.stdlib_module_names - ours
    assert others, f"no imports found in {folders}"
    pinned = {pin.split("==")[0] for pin in pins}
    assert {PACKAGES.get(name, name) for name in others} <= pinned


def test_only_the_export_needs_the_packages_of_the_export() -> None:
    names = {pin.split("==")[0] for pin in requirements("requirements-export.txt")}
    assert names
    assert not names & {pin.split("==")[0] for pin in requirements("requirements.txt")}
    users = [
        path.name
        for path in (ROOT / "mnist_ddp").rglob("*.py")
        if re.search(rf"import ({'|'.join(names)})", path.read_text())
    ]
    assert users == ["export.py"]
    assert "-r requirements-export.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()
