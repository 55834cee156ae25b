"""Who may import whom, read from the source.

python -m pytest tests/test_imports.py
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [ROOT / "train_accel.py", *sorted((ROOT / "mnist_ddp").rglob("*.py"))]
}
# What a collective looks like, called on torch.distributed, Accelerator or imported from accelerate.utils.
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_for_metrics", "gather_object", "reduce", "reduce_scatter", "scatter"),
    *("wait_for_everyone", "split_between_processes", "main_process_first", "local_main_process_first"),
}


def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def imports_of(module: str) -> set[str]:
    """Dotted names of all that a module imports, also within functions: `from a import b` counts as a and a.b."""
    names = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top(name: str) -> str:
    return name.partition(".")[0]


def part_of(module: str) -> str:
    """data, model, training, results, distributed ... of mnist_ddp.<part>.<module>; else the module itself."""
    names = module.split(".")
    return names[1] if names[0] == "mnist_ddp" and len(names) > 1 else module


def modules_of(*parts: str) -> list[str]:
    return [module for module in SOURCES if part_of(module) in parts]


def test_the_parts_are_found() -> None:
    assert {"data", "model", "training", "distributed", "settings", "train_accel"} <= set(map(part_of, SOURCES))
    assert {"torch", "mnist_ddp.settings", "mnist_ddp.errors.UserError"} <= imports_of("mnist_ddp.distributed")


@pytest.mark.parametrize("module", modules_of("data", "model", "results"))
def test_data_and_model_know_nothing_of_each_other_and_results_nothing_of_training(module: str) -> None:
    others = {"data", "model", "results", "training", "distributed", "settings", "console"} - {part_of(module)}
    if part_of(module) == "results":  # which reads data, and loads the model
        others -= {"data", "model"}
    if module == "mnist_ddp.results.predict":  # which runs on as many processes as training
        others -= {"distributed", "settings"}
    known = {part_of(name) for name in imports_of(module) if top(name) == "mnist_ddp"}
    assert not known & others


@pytest.mark.parametrize("module", modules_of("training"))
def test_training_takes_values_not_settings(module: str) -> None:
    known = {part_of(name) for name in imports_of(module) if top(name) == "mnist_ddp"}
    assert not known & {"results", "console", "distributed"}
    if module != "mnist_ddp.training.run_folder":  # which writes them down
        assert "settings" not in known


@pytest.mark.parametrize("module", [module for module in SOURCES if part_of(module) not in ("results", "train_accel")])
def test_nothing_imports_results_but_the_entry_script(module: str) -> None:
    assert not {name for name in imports_of(module) if name.startswith("mnist_ddp.results")}


def test_the_entry_script_imports_results_once_and_after_training() -> None:
    nodes = [node for node in ast.walk(tree_of("train_accel")) if isinstance(node, ast.ImportFrom)]
    (found,) = (node for node in nodes if str(node.module).startswith("mnist_ddp.results"))
    loop = next(node for node in ast.walk(tree_of("train_accel")) if isinstance(node, ast.For))
    assert found.lineno > (loop.end_lineno or 0)


@pytest.mark.parametrize("module", SOURCES)
def test_matplotlib_is_imported_by_pictures_alone(module: str) -> None:
    if module != "mnist_ddp.results.pictures":
        assert "matplotlib" not in set(map(top, imports_of(module)))


@pytest.mark.parametrize("module", SOURCES)
def test_only_training_check_and_distributed_touch_collectives(module: str) -> None:
    if part_of(module) in ("training", "check", "distributed", "rendezvous"):
        return
    if module not in ("mnist_ddp.model.batchnorm", "mnist_ddp.model.exchange"):  # as nn.SyncBatchNorm does
        assert not {name for name in imports_of(module) if name.startswith("torch.distributed")}
        nodes = list(ast.walk(tree_of(module)))
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        names = {func.attr for func in called if isinstance(func, ast.Attribute)}
        names |= {func.id for func in called if isinstance(func, ast.Name)}
        assert not names & COLLECTIVES
        assert "torch.distributed" not in {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    # The two name its class in their signatures.
    assert "accelerate" not in set(map(top, imports_of(module))) or module.endswith((".console", ".results.predict"))


@pytest.mark.parametrize("module", ["mnist_ddp", *modules_of("settings", "errors")])
def test_help_needs_no_torch(module: str) -> None:
    names = {"__init__"} if module == "mnist_ddp" else set()
    imported = imports_of(module if not names else "mnist_ddp.__init__")
    ours = {name for name in imported if top(name) == "mnist_ddp"}
    assert all(name.startswith("mnist_ddp.errors") for name in ours)
    assert {top(name) for name in imported} <= {"mnist_ddp", "tyro", "yaml", *sys.stdlib_module_names}


def test_the_entry_script_imports_no_torch_at_its_top() -> None:
    names = set()
    for node in tree_of("train_accel").body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {getattr(node, "module", None) or node.names[0].name}
    assert {name for name in names if top(name) not in sys.stdlib_module_names} == {
        "mnist_ddp.errors",
        "mnist_ddp.settings",
    }


@pytest.mark.parametrize("module", SOURCES)
def test_no_module_is_a_drawer(module: str) -> None:
    assert SOURCES[module].stem not in ("utils", "helpers", "common")
