"""The ConvNet: any size, any number of classes, and the same network after it was saved.

python -m pytest tests/model/test_convnet.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mnist_ddp.errors import UserError
from mnist_ddp.model.convnet import ConvNet, build_model, check_batch_size

ROOT = Path(__file__).resolve().parents[2]


def images_of(height: int, width: int, n: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, height, width), generator=generator, dtype=torch.uint8)


def net_of(height: int = 28, width: int = 28, classes: int = 10, seed: int = 0, channels: int = 4) -> ConvNet:
    names = [f"class {index}" for index in range(classes)]
    return build_model(names, (height, width), width=channels, mean=0.2, std=0.4, seed=seed)


@pytest.mark.parametrize("classes", [2, 10, 47])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (1, 1), (2, 30), (7, 12), (32, 32), (65, 33)])
def test_takes_images_of_any_size_and_any_number_of_classes(height: int, width: int, classes: int) -> None:
    net = net_of(height, width, classes)
    logits = net(images_of(height, width))
    logits.square().sum().backward()
    assert logits.shape == (3, classes)
    assert logits.isfinite().all()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert len(net.class_names) == classes


@pytest.mark.parametrize(("height", "width"), [(28, 28), (20, 33), (64, 64)])
def test_takes_other_sizes_than_it_was_made_for(height: int, width: int) -> None:
    with torch.inference_mode():
        assert net_of(28, 28).eval()(images_of(height, width)).shape == (3, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_and_fractions_give_the_same_logits(dtype: torch.dtype) -> None:
    net, images = net_of().to(dtype).eval(), images_of(28, 28)
    with torch.inference_mode():
        from_bytes, from_fractions = net(images), net(images.to(dtype) / 255)
    assert from_bytes.dtype == dtype
    torch.testing.assert_close(from_bytes, from_fractions, rtol=0, atol=0)
    assert from_bytes.std(dim=0).min() > 0  # it looks at the image


def test_scores_are_exact_in_half_precision_too() -> None:
    """Of 2,000 images, bf16 would give hundreds two best classes."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = net_of()(torch.rand(2000, 28, 28))
    assert logits.dtype == torch.float32
    best, second = logits.topk(2).values.unbind(1)
    assert (best > second).all()


def test_normalises_by_its_own_mean_and_std() -> None:
    """Images moved to another mean and spread, with the network's mean and std moved alike, look the same to it."""
    images = images_of(28, 28).double() / 255
    names = tuple("0123456789")
    net = build_model(names, (28, 28), width=4, mean=0.2, std=0.4, seed=0).double().eval()
    moved = build_model(names, (28, 28), width=4, mean=0.2 * 3 + 5, std=0.4 * 3, seed=0).double().eval()
    with torch.inference_mode():
        torch.testing.assert_close(moved(images * 3 + 5), net(images), rtol=0, atol=1e-12)
        assert not torch.allclose(moved(images), net(images))


def test_the_batch_may_lie_in_memory_either_way() -> None:
    net, images = net_of().double(), images_of(28, 28)
    expected = net(images)
    net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(images), expected, rtol=0, atol=1e-12)


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = net_of(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.testing.assert_close(net_of(seed=3).state_dict(), one, rtol=0, atol=0)
    other = net_of(seed=4).state_dict()
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])


def test_width_widens() -> None:
    sizes = [sum(parameter.numel() for parameter in net_of(channels=channels).parameters()) for channels in (4, 8, 16)]
    assert sizes == sorted(set(sizes))


def test_a_fresh_process_loads_what_was_saved(tmp_path: Path) -> None:
    """With weights and BatchNorm statistics as after training, class names and a size that are not the defaults."""
    net = net_of(20, 14, classes=5)
    images = images_of(20, 14)
    for _ in range(3):
        net(images)
    net.eval()
    with torch.inference_mode():
        expected = net(images)
    net.save_pretrained(tmp_path / "cnn")
    assert {path.name for path in (tmp_path / "cnn").iterdir()} >= {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "cnn" / "config.json").read_text())
    assert (config["class_names"], config["mean"]) == (list(net.class_names), 0.2)

    torch.save(images, tmp_path / "images.pt")
    program = (
        "import sys, torch; from mnist_ddp.model.convnet import ConvNet; torch.set_num_threads(1);"
        "net = ConvNet.from_pretrained(sys.argv[1]); assert not net.training;"
        "logits = net(torch.load(sys.argv[2])).detach();"
        "torch.save((logits, net.class_names, net.image_size, net.mean, net.std), sys.argv[3])"
    )
    paths = [str(tmp_path / name) for name in ("cnn", "images.pt", "loaded.pt")]
    subprocess.run([sys.executable, "-W", "error", "-c", program, *paths], cwd=ROOT, check=True, timeout=100)
    logits, *rest = torch.load(tmp_path / "loaded.pt")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert rest == [net.class_names, (20, 14), 0.2, 0.4]


@pytest.mark.parametrize(("size", "batch", "enough"), [(8, 1, False), (8, 2, True), (9, 1, True)])
def test_a_batch_too_small_for_batchnorm_is_refused(size: int, batch: int, enough: bool) -> None:
    net = build_model("ab", (size, size), width=2, mean=0.2, std=0.4, seed=0).train()
    images = torch.zeros(batch, size, size)
    if enough:
        check_batch_size(net, batch, 1)
        net(images)
    else:
        check_batch_size(net, 1, 2)  # two processes share their statistics
        with pytest.raises(UserError, match=r"^--batch_size 1: BatchNorm needs 2 or more images of 8x8 in a step$"):
            check_batch_size(net, batch, 1)
        with pytest.raises(ValueError, match="more than 1 value"):
            net(images)
