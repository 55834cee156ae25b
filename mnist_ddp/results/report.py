"""The report of a run, made from its folder alone: report.html, one file that needs no other, and pictures/.

python -m mnist_ddp.results.report pt/
"""

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from mnist_ddp.errors import UserError, exit_with_one_line
from mnist_ddp.files import replace_folder, write_whole
from mnist_ddp.results.facts import FACTS, Mistake, image_of
from mnist_ddp.words import counted

REPORT, PICTURES = "report.html", "pictures"
_PRECISIONS = {"no": "fp32"}

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: #fff; color: #1a1c1e;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: clamp(1.6rem, 5vw, 2.4rem); line-height: 1.2; }
h2 { margin: 2.5rem 0 .75rem; padding-top: 1rem; border-top: 1px solid #d9dcdf; font-size: 1.25rem; }
p { margin: .5rem 0; max-width: 44rem; }
.quiet { color: #5f6368; font-size: .9rem; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.charts img { display: block; width: 100%; max-width: 30rem; height: auto; margin: 0 auto; }
.wide { overflow-x: auto; }
.wide img { max-width: none; margin: 0; }
.mistakes { display: grid; gap: 1rem .75rem; grid-template-columns: repeat(auto-fill, minmax(5.6rem, 1fr)); }
.mistakes figure { margin: 0; font-size: .85rem; line-height: 1.35; }
.mistakes img { display: block; width: 100%; image-rendering: pixelated; margin-bottom: .3rem; }
pre { margin: .5rem 0; padding: .75rem 1rem; background: #f3f5f6; border-radius: .4rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .9rem; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .95rem; }
th, td { padding: .3rem 1.5rem .3rem 0; border-bottom: 1px solid #e3e6e8; text-align: left; vertical-align: top;
  font-weight: normal; overflow-wrap: anywhere; }
th { color: #5f6368; white-space: nowrap; }
"""


def make_report(folder: Path) -> list[Path]:
    """Writes report.html and pictures/ from the other files of the run folder, whatever of them is there.

    Returns:
        The pictures.

    Raises:
        UserError: the folder holds no run.
        OSError: a file could not be read or written.
    """
    from mnist_ddp.results import pictures  # here: matplotlib takes most of a second

    settings, metrics, result, facts = _read(folder)
    drawn: dict[str, bytes] = {}
    if metrics:
        best, stop = result.get("best_epoch", 0), _stop(result)
        drawn["loss.png"] = pictures.loss_curves(metrics, best, stop)
        drawn["accuracy.png"] = pictures.accuracy_curve(metrics, best, stop)
        drawn["throughput.png"] = pictures.throughput(metrics)
    names, mistakes = facts.get("class_names", []), facts.get("mistakes", [])
    if facts.get("confusion"):
        confusion = np.array(facts["confusion"])
        drawn["confusion.png"] = pictures.confusion_matrix(confusion, names)
        drawn["classes.png"] = pictures.class_accuracies(confusion, names)
    if mistakes:
        captions = [f"#{m['image']}: {_short(names[m['true']])} → {_short(names[m['predicted']])}" for m in mistakes]
        drawn["mistakes.png"] = pictures.mistakes([image_of(mistake) for mistake in mistakes], captions)

    page = _page(settings, metrics, result, facts, drawn)
    replace_folder(folder / PICTURES, lambda new: [(new / name).write_bytes(png) for name, png in drawn.items()])
    write_whole(folder / REPORT, page.encode())
    return [folder / PICTURES / name for name in drawn]


def _read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Settings, metrics, result and facts; empty where there are none."""
    if not (folder / "settings.yaml").exists():
        raise UserError(f"{folder}: holds no run, for it has no settings.yaml")
    try:
        settings = yaml.safe_load((folder / "settings.yaml").read_text())
        metrics_path = folder / "metrics.jsonl"
        lines = metrics_path.read_text().splitlines() if metrics_path.exists() else []
        result, facts = (
            json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            for name in ("result.json", FACTS)
        )
        return settings, [json.loads(line) for line in lines], result, facts
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{folder}: a file of the run is damaged: {' '.join(str(error).split())}") from error


# ---- words


def headline(result: Mapping[str, Any]) -> str:
    """What came out, in a few words."""
    if result.get("test_accuracy") is not None:
        return f"Test accuracy {result['test_accuracy']:.2%}"
    return {"preempted": "Stopped before the end", "diverged": "Training diverged"}.get(
        result.get("status", ""), "A run that has not ended"
    )


def sentence(result: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What came out and why training ended."""
    epochs, best = result.get("epochs", 0), result.get("best_epoch", 0)
    if result.get("status") == "preempted":
        so_far = f"; the best of {counted(epochs, 'epoch')} so far is {best}, with validation accuracy " if best else ""
        so_far += f"{result['best_val_accuracy']:.2%}" if best else ""
        return f"A signal stopped it in epoch {epochs + 1}{so_far}. The same command goes on from there."
    # Those of the warm-up take none, see TrainingState.end_epoch.
    longer = "; epochs of the warm-up take no patience" * (epochs - best > settings.get("patience", epochs))
    why = {
        "early_stopped": f"training stopped after {counted(epochs, 'epoch')}, because validation {settings['monitor']} "
        f"had not improved for {counted(epochs - best, 'epoch')}{longer}",
        "finished": f"training ran all {counted(epochs, 'epoch')}",
        "target_reached": f"training stopped after {counted(epochs, 'epoch')}, because validation accuracy reached "
        f"{settings['target_accuracy']:.2%}",
        "diverged": f"training ended in epoch {epochs + 1}, because the loss or a gradient was no longer finite",
    }.get(result.get("status", ""), "the run has no result yet, or was killed")
    if result.get("test_accuracy") is None:
        return f"{why[0].upper()}{why[1:]}."
    right = round(result["test_accuracy"] * result["num_test"])
    return f"The model of epoch {best} reads {right:,} of {result['num_test']:,} test images right; {why}."


def _stop(result: Mapping[str, Any]) -> str:
    since_best = result.get("epochs", 0) - result.get("best_epoch", 0)
    return {
        "early_stopped": f"stopped: {counted(since_best, 'epoch')} without a better one",
        "finished": "stopped: all epochs were run",
        "target_reached": "stopped: target accuracy reached",
        "preempted": "stopped by a signal",
        "diverged": "diverged after this epoch",
    }.get(result.get("status", ""), "last epoch so far")


def _short(name: str) -> str:
    return name if len(name) <= 8 else f"{name[:7]}…"


# ---- HTML


def _page(
    settings: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    facts: Mapping[str, Any],
    drawn: Mapping[str, bytes],
) -> str:
    title = headline(result)
    parts = [f"<h1>{_text(title)}</h1>", f"<p>{_text(sentence(result, settings))}</p>"]
    if metrics:
        charts = [
            _chart(drawn["loss.png"], "Training and validation loss over the epochs"),
            _chart(drawn["accuracy.png"], "Validation accuracy over the epochs"),
        ]
        parts += ["<h2>Training</h2>", _grid(charts)]
    if facts.get("confusion"):
        count = len(facts["class_names"])
        charts = [
            _chart(drawn["confusion.png"], "Confusion matrix: true class against predicted class", wide=count > 20),
            _chart(drawn["classes.png"], "Accuracy on the test images of each class"),
        ]
        parts += ["<h2>Test images by class</h2>", _grid(charts, single=count > 20)]
        shown, total = len(facts["mistakes"]), sum(map(sum, facts["confusion"])) - int(np.trace(facts["confusion"]))
        heading = f"The {shown} most confident of {total:,} mistakes" if shown < total else "All mistakes"
        parts += [f"<h2>{heading}</h2>", _mistakes(facts["mistakes"], facts["class_names"])]
    parts += ["<h2>The run</h2>", *_what_was_run(result, facts, drawn.get("throughput.png"))]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{_CSS}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _mistakes(mistakes: Sequence[Mistake], names: Sequence[str]) -> str:
    if not mistakes:
        return "<p>There are none: every test image was read right.</p>"
    figures = []
    for mistake in mistakes:
        true, predicted = _text(names[mistake["true"]]), _text(names[mistake["predicted"]])
        source = _data_url(_png(mistake))
        figures.append(
            f'<figure><img src="{source}" alt="Image of class {true} that was taken for {predicted}">'
            f"<figcaption>true <b>{true}</b><br>predicted <b>{predicted}</b><br>"
            f'<span class="quiet">{mistake["probability"]:.1%}<br>image {mistake["image"]:,}</span></figcaption>'
            "</figure>"
        )
    words = "With the probability that the model gave to its prediction, and the number of the image, from 1."
    return f'<p class="quiet">{words}</p>\n<div class="mistakes">\n' + "\n".join(figures) + "\n</div>"


def _what_was_run(result: Mapping[str, Any], facts: Mapping[str, Any], throughput: bytes | None) -> list[str]:
    rows: dict[str, Any] = {}
    if result:
        rows["device"] = f"{counted(result['world_size'], 'process')} on {result['device']}"
        rows["precision"] = _PRECISIONS.get(result["mixed_precision"], result["mixed_precision"])
        rows["parameters"] = f"{result['parameters']:,}"
        rows["time"] = f"{result['wall_seconds']:,.0f} s"
    if facts:
        rows["images from"] = ", ".join(dict.fromkeys(facts["sources"].values()))
        rows |= {f"{name} images": f"{count:,}" for name, count in facts["images"].items()}
        rows |= facts["versions"]
    parts = [f"<pre>{_text(facts['command'])}</pre>"] if facts else []
    charts = [_chart(throughput, "Training images per second in each epoch")] if throughput else []
    parts.append(_grid([*charts, _table(rows)]))
    changed = facts.get("changed_settings")
    if changed:
        parts += ["<p>Settings that differ from the defaults:</p>", _table(changed)]
    elif facts:
        parts.append("<p>All settings have their defaults.</p>")
    return parts


def _grid(charts: Sequence[str], single: bool = False) -> str:
    style = ' style="display: block"' if single else ""
    return f'<div class="charts"{style}>\n' + "\n".join(charts) + "\n</div>"


def _chart(png: bytes, words: str, wide: bool = False) -> str:
    width, height = Image.open(io.BytesIO(png)).size
    image = f'<img src="{_data_url(png)}" width="{width // 2}" height="{height // 2}" alt="{_text(words)}">'
    return f'<div class="wide">{image}</div>' if wide else f"<div>{image}</div>"


def _table(rows: Mapping[str, Any]) -> str:
    lines = (f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows.items())
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _png(mistake: Mistake) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image_of(mistake)).save(file, "PNG")
    return file.getvalue()


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _text(value: Any) -> str:
    return html.escape(str(value))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m mnist_ddp.results.report", description="Make the report of a run again."
    )
    parser.add_argument("folder", type=Path, help="run folder, such as pt/")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    folder = parse(words).folder
    try:
        make_report(folder)
    except OSError as error:
        raise UserError(f"{folder}: the report cannot be written: {error.strerror or error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: its files are damaged, or of another version ({error!r})") from error
    print(folder / REPORT)
    return 0


if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main(sys.argv[1:]))
