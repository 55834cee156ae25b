"""What only a GPU can show; without one, all of it is skipped. `bash benchmarks/gpu.sh` runs it, with the benchmark.

python -m pytest tests/test_gpu.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launching import run
from ranks import accelerator_of, leave_group, run_ranks
from torch import Tensor, nn

from mnist_ddp.data.image_set import ImageSet
from mnist_ddp.data.loaders import Splits, make_loaders, split
from mnist_ddp.data.reading import read_files
from mnist_ddp.model.batchnorm import convert_sync_batchnorm
from mnist_ddp.model.convnet import build_model
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.loop import train_step
from mnist_ddp.training.state import start_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def losses_on(device: str, steps: int, mixed_precision: str = "no", sync_debug: str = "default") -> list[float]:
    """Losses of the first steps on 2,048 of the embedded digits, by the project's step function in this process."""
    cpu = device == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        if cpu:
            patch.setenv("ACCELERATE_USE_CPU", "true")
        accelerator = accelerator_of(mixed_precision=mixed_precision)
        try:
            whole = read_files("")["train"]
            some = ImageSet(whole.images[:2560], whole.labels[:2560], whole.class_names, "some")
            splits = Splits(*split(some, (0.1, 0.1), seed=0))
            loaders = make_loaders(
                splits, accelerator.device, seed=0, augment=True, batch_size=256, processes=1, accumulation_steps=1
            )
            train_loader, _, _ = accelerator.prepare(*loaders)
            state = start_training(
                accelerator,
                build_model(whole.class_names, (28, 28), width=16, mean=0.13, std=0.31, seed=0),
                EarlyStopping("accuracy", 5),
                optimizer="adamw",
                lr=1e-3,
                warmup_steps=0,
                momentum=0.9,
                weight_decay=0.01,
                ema_decay=0.95,
            )
            state.model.train()
            losses: list[Tensor] = []
            while len(losses) < steps:
                for batch in train_loader:
                    # The first step may wait for the device: kernels are chosen, memory is allocated.
                    torch.cuda.set_sync_debug_mode(sync_debug if losses else "default")
                    losses.append(train_step(accelerator, state, batch, label_smoothing=0.1, max_grad_norm=0.0).loss)
                    torch.cuda.set_sync_debug_mode("default")
            return torch.stack(losses[:steps]).tolist()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            leave_group()


def test_a_step_on_the_gpu_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert losses_on("cuda", 5) == pytest.approx(losses_on("cpu", 5), abs=1e-4)


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_half_precision_learns_like_fp32(mixed_precision: str) -> None:
    half, full = losses_on("cuda", 24, mixed_precision), losses_on("cuda", 24)
    assert full[-1] < full[0] - 0.3
    assert half[-1] == pytest.approx(full[-1], abs=0.1)


def test_a_step_does_not_wait_for_the_device() -> None:
    losses_on("cuda", 8, sync_debug="error")


def on_one_gpu(images: Tensor, labels: Tensor, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One of two ranks that share a GPU, over gloo: gradients, averaged by hand, and BatchNorm statistics."""
    leave_group()
    torch.backends.cudnn.allow_tf32 = False  # which keeps 10 bits only
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = convert_sync_batchnorm(build_model("0123456789", (28, 28), width=8, mean=0.13, std=0.31, seed=0), CUDA)
    model.load_state_dict(weights)
    model.to(CUDA)
    model.train()
    half = slice(rank * 32, (rank + 1) * 32)
    F.cross_entropy(model(images[half].to(CUDA)), labels[half].to(CUDA)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        mean = parameter.grad.cpu() / 2
        dist.all_reduce(mean)
        gradients[name] = mean
    buffers = {name: value.cpu() for name, value in model.named_buffers()}
    dist.destroy_process_group()
    return gradients, buffers


CUDA = torch.device("cuda")


def test_two_processes_on_one_gpu_equal_one() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 28, 28, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    whole: nn.Module = build_model("0123456789", (28, 28), width=8, mean=0.13, std=0.31, seed=0)
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    whole.train()
    F.cross_entropy(whole(images), labels).backward()
    for gradients, buffers in run_ranks(on_one_gpu, 2, images, labels, weights):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-4, msg=name)
        for name, value in whole.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=0, atol=1e-5, msg=name)


def test_the_set_lies_on_the_gpu_where_it_fits() -> None:
    splits = Splits(*split(read_files("")["train"], (0.1, 0.1), seed=0))
    loaders = make_loaders(splits, CUDA, seed=0, augment=True, batch_size=256, processes=1, accumulation_steps=1)
    batch = next(iter(loaders.train))
    assert all(tensor is not None and tensor.device.type == "cuda" for tensor in batch)


@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
def test_the_whole_program_on_a_gpu(mixed_precision: str, tmp_path: Path) -> None:
    command = f"python train_accel.py --epochs 8 --log_with none --mixed_precision {mixed_precision}"
    ended = run(command, tmp_path / "run", CUDA_VISIBLE_DEVICES="0")
    assert ended.status == 0, ended
    assert ended.result is not None
    assert ended.result["test_accuracy"] > 0.97
    assert ended.result["mixed_precision"] == mixed_precision
    assert ended.result["device"] not in ("CPU", "")
