"""The model card is what the Hub reads, and a pushed model is the one of the run folder.

python -m pytest tests/results/test_card.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import hub
import pytest
from finished import REPOSITORY, TOKEN, Finished
from huggingface_hub import ModelCard
from launching import ROOT

from mnist_ddp.results.card import model_card, push

EMBEDDED = str(ROOT / "data" / "mnist_test.csv.gz")


def test_its_metadata_are_the_hubs(finished: Finished) -> None:
    card, result = ModelCard.load(finished.folder / "cnn" / "README.md"), finished.ended.result
    assert result is not None
    assert card.data.license is None  # it was trained on a file of the user's
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.eval_results is not None
    (measured,) = card.data.eval_results
    assert (measured.metric_type, measured.metric_value) == ("accuracy", result["test_accuracy"])
    # The program has split the file: a reader of the file knows no test split of it.
    assert (measured.dataset_name, measured.dataset_split) == (f"small.csv, {result['num_test']} held out", None)
    assert "| width | 4 |" in card.text
    assert f"**{result['test_accuracy']:.2%}**" in card.text


def test_it_tells_nothing_of_the_machine(finished: Finished, small_csv: Path) -> None:
    text = (finished.folder / "cnn" / "README.md").read_text()
    assert str(small_csv.parent) not in text
    assert str(finished.folder.parent) not in text


def test_its_example_loads_the_model_in_a_fresh_process(finished: Finished) -> None:
    """With the folder where the repository's name stands."""
    text = (finished.folder / "cnn" / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert f'from_pretrained("{REPOSITORY}")' in example
    example = example.replace(f'"{REPOSITORY}"', repr(str(finished.folder / "cnn")))
    ended = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] in set("0123456789")


@pytest.mark.parametrize(
    ("dataset", "train", "test", "expected"),
    [
        ("", EMBEDDED, EMBEDDED, ("ylecun/mnist", "MNIST's 10,000 test digits, 40 held out", None)),
        ("", "/home/me/secret/mine.csv", EMBEDDED, ("ylecun/mnist", "MNIST's 10,000 test digits", "test")),
        (
            "someone/digits",
            "someone/digits (train)",
            "someone/digits (test)",
            ("someone/digits", "someone/digits", "test"),
        ),
        (
            "someone/digits",
            "someone/digits (train)",
            "someone/digits (train)",
            ("someone/digits", "someone/digits, 40 held out", None),
        ),
        (str(ROOT / "data"), str(ROOT / "data"), str(ROOT / "data"), ("csv", "data, 40 held out", None)),
        ("", "/home/me/secret/mine.csv", "/home/me/secret/mine.csv", ("csv", "mine.csv, 40 held out", None)),
        ("", "/home/me/secret/mine.csv", "/home/me/secret/other.csv", ("csv", "other.csv", "test")),
    ],
)
def test_it_names_the_dataset(
    finished: Finished, dataset: str, train: str, test: str, expected: tuple[str, str, str | None]
) -> None:
    facts = json.loads((finished.folder / "report.json").read_text())
    facts |= {"sources": {"train": train, "val": train, "test": test}, "images": {"train": 320, "val": 40, "test": 40}}
    config = json.loads((finished.folder / "cnn" / "config.json").read_text())
    result = finished.ended.result
    assert result is not None
    card = ModelCard(model_card(finished.folder, {"dataset": dataset}, result, facts, config))
    assert card.data.eval_results is not None
    (measured,) = card.data.eval_results
    assert (measured.dataset_type, measured.dataset_name, measured.dataset_split) == expected
    assert card.data.datasets == (
        [dataset] if dataset.startswith("someone") else ["ylecun/mnist"] if train == EMBEDDED else None
    )
    assert ("CC BY-SA 3.0" in card.text) == (expected[0] == "ylecun/mnist")
    assert "/home/me" not in card.content


@pytest.mark.parametrize(
    ("val", "test", "monitor", "expected"),
    [
        ("a.csv", "a.csv", "accuracy", ["which took no part in training or in the choice", "more to choose the epoch"]),
        ("b.csv", "c.csv", "accuracy", ["which took no part in training or in the choice", "more to choose the epoch"]),
        ("b.csv", "b.csv", "accuracy", ["which were the validation images too", "more to choose the epoch"]),
        ("b.csv", "c.csv", "none", ["which took no part in training or in the choice", "more to watch it"]),
    ],
)
def test_it_says_what_the_test_images_were_used_for(
    finished: Finished, val: str, test: str, monitor: str, expected: list[str]
) -> None:
    facts = json.loads((finished.folder / "report.json").read_text())
    facts["sources"] = {"train": "a.csv", "val": val, "test": test}
    config = json.loads((finished.folder / "cnn" / "config.json").read_text())
    assert finished.ended.result is not None
    card = model_card(finished.folder, {"monitor": monitor}, finished.ended.result, facts, config)
    for words in expected:
        assert words in card


def test_the_hub_has_the_folder(finished: Finished) -> None:
    files = {path.name: path.read_bytes() for path in (finished.folder / "cnn").iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors"}
    pushed = finished.repositories[REPOSITORY]
    assert {name: pushed[name] for name in files} == files
    assert re.search(rf"^pushed to http://\S+/{REPOSITORY}$", finished.ended.stdout, re.M), finished.ended


def test_the_token_is_nowhere(finished: Finished) -> None:
    assert TOKEN not in finished.ended.stdout + finished.ended.stderr
    for path in finished.folder.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


def test_a_refused_push_tells_why_without_the_token(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; from pathlib import Path; from mnist_ddp.results.card import push; "
        "push(Path(sys.argv[1]), 'me/digits')"
    )
    with hub.serve("another") as server:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(finished.folder)],
            cwd=ROOT,
            env={"HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN, "HOME": str(finished.folder), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "RuntimeError: HfHubHTTPError: Client error '401 Unauthorized'" in ended.stderr
    assert TOKEN not in ended.stderr
    assert server.repositories == {}


def test_the_token_is_taken_out_of_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as that of an HTTP client which shows the header that it cannot send."""

    def refuse(*args: object, **options: object) -> None:
        raise ValueError(f"Illegal header value b'Bearer {TOKEN}'")

    monkeypatch.setattr("mnist_ddp.results.card.HfApi.create_repo", refuse)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(RuntimeError, match=r"^ValueError: Illegal header value b'Bearer \*\*\*'$"):
        push(tmp_path, REPOSITORY)
