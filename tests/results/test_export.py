"""The ONNX file gives what the model gives; one that does not is never written.

python -m pytest tests/results/test_export.py
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from launching import ROOT

from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet
from mnist_ddp.results import export


@pytest.fixture(scope="module")
def model() -> ConvNet:
    torch.manual_seed(0)
    model = ConvNet(("no", "yes", "perhaps"), (20, 12), width=4, mean=0.2, std=0.4)
    model(torch.randint(256, (64, 20, 12), dtype=torch.uint8))  # BatchNorm's statistics are no longer 0 and 1
    return model.eval()


@pytest.mark.slow
def test_any_number_of_images_gives_the_probabilities_of_the_model(model: ConvNet, tmp_path: Path) -> None:
    assert export.export(model, tmp_path / "cnn.onnx") <= 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "cnn.onnx", providers=["CPUExecutionProvider"])
    (image_input,), (output,) = session.get_inputs(), session.get_outputs()
    assert (image_input.name, image_input.type, image_input.shape[1:]) == ("images", "tensor(uint8)", [20, 12])
    assert (output.name, output.type) == ("probabilities", "tensor(float)")
    assert session.get_modelmeta().custom_metadata_map["class_names"] == '["no", "yes", "perhaps"]'
    for count in (1, 2, 300):
        images = torch.randint(256, (count, 20, 12), dtype=torch.uint8)
        (found,) = session.run(None, {"images": images.numpy()})
        with torch.inference_mode():
            expected = model(images).softmax(1).numpy()
        assert found.shape == (count, 3)
        assert np.abs(found - expected).max() <= 1e-5


def test_a_file_that_differs_is_not_kept(model: ConvNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match=r"differs from the model by .*; nothing was written"):
        export.export(model, tmp_path / "cnn.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line_that_names_the_requirements(model: ConvNet, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    program = (
        "import runpy, sys; sys.modules['onnxruntime'] = None; "
        "runpy.run_module('mnist_ddp.results.export', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "-o", str(tmp_path / "cnn.onnx")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr == f"error: export needs the package onnxruntime: pip install -r {export.REQUIREMENTS}\n"
    assert (ROOT / export.REQUIREMENTS).exists()
    assert not (tmp_path / "cnn.onnx").exists()


def test_the_digits_are_resized_to_the_model() -> None:
    whole, small = export.some_digits((28, 28)), export.some_digits((14, 14))
    assert (whole.shape, small.shape, small.dtype) == ((256, 28, 28), (256, 14, 14), torch.uint8)
    assert small.float().mean() == pytest.approx(whole.float().mean().item(), rel=0.02)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        export.main([str(tmp_path), "-o", str(tmp_path / "cnn.onnx")])
