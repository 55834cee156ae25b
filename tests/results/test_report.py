"""The report: its figures are the run's, a browser shows all of it, and it cannot spoil a run.

python -m pytest tests/results/test_report.py
"""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import needs_chromium, screenshot, visit
from finished import Finished
from launching import ROOT, run
from PIL import Image

from mnist_ddp.data.loaders import Subset, make_splits
from mnist_ddp.data.reading import read_files
from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.results.facts import confident_mistakes, image_of, wilson_interval
from mnist_ddp.results.report import main, make_report
from mnist_ddp.results.write import write_results

PICTURES = {"loss", "accuracy", "throughput", "confusion", "classes", "mistakes"}
# Put into a page that holds the report in frames, this writes down what a reader would see, and where it does not fit.
LOOK = """
onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    return {images: [...page.images].map(image => image.complete && image.naturalWidth > 0),
            described: [...page.images].every(image => image.alt),
            overflow: page.documentElement.scrollWidth - frame.clientWidth};
  });
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "END";
};
"""


@pytest.fixture
def folder(finished: Finished, tmp_path: Path) -> Path:
    """The files of the run that a report is made from, and none of the others."""
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("settings.yaml", "metrics.jsonl", "result.json", "report.json"):
        shutil.copy(finished.folder / name, copy)
    return copy


def facts_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def words_of(folder: Path) -> str:
    """The text of the report, without tags."""
    page = (folder / "report.html").read_text().partition("<body>")[2]
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def test_a_run_leaves_a_report_and_pictures(finished: Finished) -> None:
    words, result = words_of(finished.folder), finished.ended.result
    assert result is not None
    assert f"Test accuracy {result['test_accuracy']:.2%}" in words
    assert f"{round(result['test_accuracy'] * 40)} of 40 test images right; training ran all 2 epochs" in words
    assert "python train_accel.py --mnist_file_path" in words
    for setting in ("epochs 2", "batch_size 64", "width 4", "push_to_hub me/digits"):
        assert setting in words, words
    assert "weight_decay" not in words, "it has its default"
    assert f"torch {torch.__version__}" in words
    assert "1 process on CPU" in words
    total = 40 - round(result["test_accuracy"] * 40)
    assert (f"The 25 most confident of {total} mistakes" if total > 25 else "All mistakes") in words
    for name in PICTURES:
        with Image.open(finished.folder / "pictures" / f"{name}.png") as picture:
            assert np.asarray(picture.convert("L")).std() > 5, f"{name} is blank"
    assert "warning" not in finished.ended.stderr, finished.ended


def test_its_figures_are_those_of_the_test(finished: Finished, small_csv: Path) -> None:
    """Counted again, with the model of the run folder on the split of its seed."""
    facts, result = facts_of(finished.folder), finished.ended.result
    assert result is not None
    test = make_splits(read_files(str(small_csv)), val_fraction=0.1, test_fraction=0.1, seed=1206).test
    model = ConvNet.from_pretrained(finished.folder / "cnn").eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=result["mixed_precision"] == "bf16"):
        probabilities = model(test.image_set.images[test.indices]).float().softmax(1)
    labels, predicted = test.image_set.labels[test.indices], probabilities.argmax(1)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    for true, other in zip(labels, predicted, strict=True):
        confusion[true, other] += 1
    assert facts["confusion"] == confusion.tolist()
    assert confusion.trace() / 40 == pytest.approx(result["test_accuracy"])

    wrong = [place for place in range(40) if labels[place] != predicted[place]]
    assert len(wrong) > 0
    surest = sorted(wrong, key=lambda place: -float(probabilities[place].max()))[:25]
    assert [mistake["image"] - 1 for mistake in facts["mistakes"]] == test.indices[surest].tolist()
    for mistake, place in zip(facts["mistakes"], surest, strict=True):
        assert (mistake["true"], mistake["predicted"]) == (labels[place], predicted[place])
        assert mistake["probability"] == pytest.approx(float(probabilities[place].max()), abs=1e-5)
        assert (image_of(mistake) == test.image_set.images[test.indices[place]].numpy()).all()


def test_only_the_surest_mistakes_are_kept(finished: Finished, small_csv: Path) -> None:
    everything = read_files(str(small_csv))["train"]
    model = ConvNet.from_pretrained(finished.folder / "cnn")
    subset = Subset(everything, torch.arange(len(everything)))
    all_of_them = confident_mistakes(model, subset, nullcontext, count=400)
    shown = confident_mistakes(model, subset, nullcontext)
    assert len(all_of_them) > len(shown) == 25
    assert shown == all_of_them[:25]
    shares = [mistake["probability"] for mistake in all_of_them]
    assert shares == sorted(shares, reverse=True)


def test_it_is_made_again_from_the_folder_alone(
    finished: Finished, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_bytes() == (finished.folder / "report.html").read_bytes()
    assert {path.stem for path in (folder / "pictures").iterdir()} == PICTURES


# ---- in a browser


@needs_chromium
def test_a_browser_shows_it_whole_on_a_desk_and_on_a_phone(finished: Finished, tmp_path: Path) -> None:
    report = finished.folder / "report.html"
    alone = visit(report)
    assert alone.console == []
    assert alone.requests == []
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{html.escape(report.read_text())}"></iframe>'
        for width in (1100, 360)
    )
    (tmp_path / "frames.html").write_text(f"<!doctype html><script>{LOOK}</script><body>{frames}")
    seen = json.loads(visit(tmp_path / "frames.html").dom.rpartition("SEEN")[2].partition("END")[0])
    mistakes = len(facts_of(finished.folder)["mistakes"])
    for page in seen:
        assert page["images"] == [True] * (5 + mistakes)
        assert page["described"]
        assert page["overflow"] <= 0, "it must be scrolled sideways"
    screenshot(report, tmp_path / "page.png", 1100, 2000)
    with Image.open(tmp_path / "page.png") as picture:
        colours = {colour[:3] for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0, 114, 178), (213, 94, 0), (0, 0, 0), (255, 255, 255)} <= colours


@needs_chromium
def test_a_browser_would_tell_of_a_fault(tmp_path: Path) -> None:
    page = tmp_path / "faulty.html"
    page.write_text('<link rel="stylesheet" href="https://fonts.example/css"><script>missing()</script>')
    seen = visit(page)
    assert seen.requests == ["https://fonts.example/css"]
    assert any("missing is not defined" in line for line in seen.console)


def test_what_a_full_disk_keeps_away_is_one_warning(
    small_csv: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "large").write_bytes(bytes(1 << 16))
    splits = make_splits(read_files(str(small_csv)), val_fraction=0.1, test_fraction=0.1, seed=1206)
    write_results(
        small_disk,
        splits,
        ConvNet("0123456789", (28, 28), width=2, mean=0.13, std=0.31),
        torch.eye(10, dtype=torch.int64),
        autocast=nullcontext,
        versions={},
        changed_settings={},
        trackers=[],
        step=1,
        push_to_hub="",
    )
    words = "report and model card are not complete; the same command again makes them (No space left on device)"
    assert capsys.readouterr().err == f"warning: {words}\n"


# ---- what a report says of runs that ended otherwise


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"status": "early_stopped", "epochs": 9, "best_epoch": 2},
            "training stopped after 9 epochs, because validation accuracy had not improved for 7 epochs; "
            "epochs of the warm-up take no patience.",
        ),
        (
            {"status": "target_reached", "epochs": 1},
            "training stopped after 1 epoch, because validation accuracy reached 0.00%.",
        ),
        (
            {"status": "diverged", "test_accuracy": None, "best_epoch": 0, "epochs": 0},
            "Training diverged Training ended in epoch 1, because the loss or a gradient was no longer finite.",
        ),
        (
            {"status": "preempted", "test_accuracy": None, "best_val_accuracy": 0.5},
            "Stopped before the end A signal stopped it in epoch 3; the best of 2 epochs so far is",
        ),
    ],
)
def test_it_says_how_the_run_ended(folder: Path, values: dict[str, Any], expected: str) -> None:
    change(folder / "result.json", **values)
    make_report(folder)
    assert expected in words_of(folder)


def test_a_run_that_was_killed_has_a_report_of_what_there_is(folder: Path) -> None:
    (folder / "result.json").unlink()
    (folder / "report.json").unlink()
    assert {path.stem for path in make_report(folder)} == {"loss", "accuracy", "throughput"}
    assert "A run that has not ended" in words_of(folder)
    (folder / "metrics.jsonl").unlink()
    assert make_report(folder) == []
    assert list((folder / "pictures").iterdir()) == []


def test_a_run_without_mistakes_says_so(folder: Path) -> None:
    change(folder / "report.json", mistakes=[], confusion=np.diag([4] * 10).tolist())
    make_report(folder)
    assert "every test image was read right" in words_of(folder)


def test_names_of_classes_are_text_and_nothing_else(folder: Path) -> None:
    names = ["<script>", "$x$", "a & b", "名前", "_", "^", "a very long name of a class", "\\frac", "{}", "é"]
    change(folder / "report.json", class_names=names)
    make_report(folder)
    page = (folder / "report.html").read_text()
    assert "<script>" not in page
    mistakes = facts_of(folder)["mistakes"]
    assert all(f"true {names[mistake['true']]} predicted" in words_of(folder) for mistake in mistakes)


def test_many_classes_fit(folder: Path) -> None:
    change(
        folder / "report.json", class_names=[f"class {i}" for i in range(62)], confusion=np.eye(62, dtype=int).tolist()
    )
    make_report(folder)
    with Image.open(folder / "pictures" / "confusion.png") as picture:
        assert min(picture.size) > 62 * 30  # pixels, for two digits each


@pytest.mark.parametrize("damage", ["settings.yaml", "metrics.jsonl", "result.json", "report.json"])
def test_a_damaged_folder_is_one_line(folder: Path, damage: str) -> None:
    (folder / damage).write_text("{")
    with pytest.raises(UserError, match="a file of the run is damaged"):
        main([str(folder)])


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        main([str(tmp_path)])


def test_intervals_are_those_of_the_literature() -> None:
    """L. D. Brown, T. T. Cai, A. DasGupta, "Interval estimation for a binomial proportion" (2001)."""
    right, counts = np.array([0, 5, 10, 98]), np.array([10, 10, 10, 100])
    low, high = wilson_interval(right, counts)
    other_low, other_high = wilson_interval(counts - right, counts)
    assert low == pytest.approx(1 - other_high)
    assert high == pytest.approx(1 - other_low)
    assert low[0] == pytest.approx(0, abs=1e-12)
    # The bounds p solve |right / n - p| = z sqrt(p (1 - p) / n).
    for bound in (low, high):
        distance = 1.96 * np.sqrt(np.clip(bound * (1 - bound), 0, None) / counts)
        assert np.abs(right / counts - bound) == pytest.approx(distance, abs=1e-9)


# ---- and a run comes first


@pytest.mark.slow
def test_a_failed_report_and_push_are_warnings(small_csv: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)  # where the report should go
    command = (
        f"python train_accel.py --mnist_file_path {small_csv} --batch_size 64 --width 4 --epochs 1 --log_with none"
    )
    ended = run(f"{command} --push_to_hub me/digits", folder, HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_secret")
    assert ended.status == 0, ended
    assert ended.result is not None
    assert ended.result["status"] == "finished"
    report, push = (line for line in ended.stderr.splitlines() if line.startswith("warning: "))
    assert f"python -m mnist_ddp.results.report {folder} makes it again (Is a directory)" in report
    assert f"the model was not pushed; hf upload me/digits {folder / 'cnn'} . tries again (" in push
    assert "hf_secret" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended
    assert ended.stdout.splitlines()[-1].startswith("test accuracy"), ended
    (folder / "report.html").rmdir()
    assert main([str(folder)]) == 0
    assert "Test accuracy" in words_of(folder)


@pytest.mark.slow
def test_a_preempted_run_leaves_a_report(small_csv: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = (
        f"--mnist_file_path {small_csv} --batch_size 64 --width 4 --patience 100000 --log_with none --pt_path {folder}"
    )
    process = subprocess.Popen([sys.executable, "train_accel.py", *flags.split()], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "cnn").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.wait()
    assert "A signal stopped it in epoch" in words_of(folder)
    assert {path.stem for path in (folder / "pictures").iterdir()} == {"loss", "accuracy", "throughput"}
    assert "Training was interrupted after" in (folder / "cnn" / "README.md").read_text()
