"""Synchronised BatchNorm against torch's own BatchNorm on the whole batch, in real gloo processes.

python -m pytest tests/model/test_batchnorm.py
"""

import copy
import datetime
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mnist_ddp.model import batchnorm, exchange
from mnist_ddp.model.batchnorm import SyncBatchNorm, convert_sync_batchnorm

CPU = torch.device("cpu")
FEW = (1, batchnorm._FEW)  # with the sums of every channel in parts, and in one
TIMEOUT_SECONDS = 180
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}  # bf16 keeps 8 bits: eps is 8e-3


class Case(NamedTuple):
    shares: tuple[int, ...]
    """Samples that each process holds."""
    shape: tuple[int, ...]
    """Of one sample: C, then the positions."""
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    strided: bool = False
    """Whether the values lie apart in memory, as in a slice of a larger tensor."""
    transposed: bool = False
    """Whether the gradient of the output lies in memory the other way round, and the values do not."""
    options: dict[str, Any] = {}  # noqa: RUF012 - of the BatchNorm, never changed


EVEN = {2: (4, 4), 3: (3, 3, 3)}
CASES = {
    name.format(P): case
    for P in (2, 3)
    for name, case in {
        "{}-fp32": Case(EVEN[P], (4, 5, 7)),
        "{}-float64": Case(EVEN[P], (4, 5, 7), torch.float64),
        "{}-bf16": Case(EVEN[P], (4, 5, 7), torch.bfloat16, torch.channels_last),
        "{}-2d": Case(EVEN[P], (4,)),
        "{}-3d": Case(EVEN[P], (4, 6)),
        "{}-3d-float64": Case(EVEN[P], (4, 6), torch.float64),
        "{}-5d": Case(EVEN[P], (4, 2, 3, 3), memory_format=torch.channels_last_3d),
        "{}-channels_last": Case(EVEN[P], (4, 5, 7), memory_format=torch.channels_last),
        "{}-strided": Case(EVEN[P], (4, 5, 7), strided=True),
        "{}-transposed": Case(EVEN[P], (1024,), torch.float64, transposed=True),
        "{}-uneven": Case({2: (5, 2), 3: (1, 4, 2)}[P], (4, 5, 7), memory_format=torch.channels_last),
        "{}-uneven-float64": Case({2: (5, 2), 3: (1, 4, 2)}[P], (4, 5, 7), torch.float64),
        "{}-one-value-each": Case((1,) * P, (4,), torch.float64),
        "{}-one-has-none": Case({2: (6, 0), 3: (0, 4, 2)}[P], (4, 5, 7), torch.float64, torch.channels_last),
        "{}-one-has-none-2d": Case({2: (0, 6), 3: (4, 2, 0)}[P], (4,)),
        "{}-no-affine": Case(EVEN[P], (4, 5, 7), options={"affine": False}),
        "{}-cumulative": Case(EVEN[P], (4, 5, 7), torch.float64, options={"momentum": None}),
        "{}-untracked": Case(EVEN[P], (4, 5, 7), options={"track_running_stats": False}),
    }.items()
}


def whole_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """The global batch (N, C, ...) of a step, far from mean 0 and std 1, and a gradient of the loss for the output."""
    generator = torch.Generator().manual_seed(step)
    x, grad = torch.randn(2, sum(case.shares), *case.shape, generator=generator, dtype=torch.float64)
    x, grad = (t.to(case.dtype, memory_format=case.memory_format) for t in (3 * x + 5, grad))
    if case.transposed:
        grad = grad.t().contiguous().t()
    if case.strided:
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    return x, grad


def plain_layer(case: Case) -> nn.Module:
    """A BatchNorm with weights as if trained, in fp32 for bf16 inputs, as under autocast."""
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(case.shape)]
    layer = kind(case.shape[0], dtype=torch.promote_types(case.dtype, torch.float32), **case.options)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(0.5, 2, parameter.numel()) + i)
    return layer


def two_steps(case: Case, layer: nn.Module, rank: int | None) -> dict[str, Tensor]:
    """Two forward and backward passes of the process's share of the batch, or of all of it, then one in evaluation."""
    results = {}
    for step in range(2):
        x, grad = whole_batch(case, step)
        if rank is not None:
            x, grad = x.split(case.shares)[rank], grad.split(case.shares)[rank]
        x = x.detach().requires_grad_()
        y = layer(x)
        y.backward(grad)
        results |= {f"output {step}": y.detach(), f"input gradient {step}": x.grad}
    results |= {f"{name} gradient": parameter.grad for name, parameter in layer.named_parameters()}
    results |= dict(layer.named_buffers())
    if case.options.get("track_running_stats", True):
        with torch.no_grad():
            results["evaluation"] = layer.eval()(x)
    return results


def conv_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False))
    return nn.Sequential(*layers, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10)).to(dtype)


def train(net: nn.Module, rank: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Five steps of SGD on the process's half of each batch, or on all of it; returns the final state."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        images = torch.randn(8, 1, 8, 8, generator=generator, dtype=dtype)
        images += torch.arange(8).view(-1, 1, 1, 1) / 4  # the halves have different means
        labels = torch.randint(10, (8,), generator=generator)
        mine = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
        optimizer.step()
    return dict(net.state_dict())


def train_halves(rank: int, dtype: torch.dtype, pair: dist.ProcessGroup, synchronise: bool) -> dict[str, Tensor]:
    net = conv_net(dtype)
    if synchronise:
        net = convert_sync_batchnorm(net, CPU, pair)
    train(DistributedDataParallel(net, process_group=pair), rank, dtype)
    return dict(net.state_dict())


def collectives_of_a_step(rank: int) -> list[str]:
    """Gloo's collectives that rank 0 sees in a forward and a backward pass of all, without shared memory."""
    layer = SyncBatchNorm(4)
    x = torch.randn(3, 4, requires_grad=True)
    if rank > 0:  # starting a profiler costs seconds
        layer(x).sum().backward()
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    return [event.name for event in profile.events() if event.name.startswith("c10d::")]


def error_on_one_value() -> str:
    """What all processes raise where the first holds one value per channel and the others none."""
    try:
        SyncBatchNorm(4)(torch.ones(1 if dist.get_rank() == 0 else 0, 4))
    except ValueError as error:
        return str(error)
    return "none"


def process(rank: int, folder: str) -> None:
    """Runs all that needs processes in one start of three, where two are a group, and saves what it gave."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    pair = dist.new_group([0, 1])
    results: dict[str, Any] = {}
    for few in FEW:
        batchnorm._FEW = few
        batchnorm._layout.cache_clear()
        for name, case in CASES.items():
            P = len(case.shares)
            if rank < P:
                layer = convert_sync_batchnorm(plain_layer(case), CPU, pair if P == 2 else None)
                results[f"{name}, {few}"] = two_steps(case, layer, rank)
    results["error"] = error_on_one_value()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CAPACITY", 0)
        results["collectives"] = collectives_of_a_step(rank)
    if rank < 2:
        for dtype in (torch.float32, torch.float64):
            results[f"synchronised {dtype}"] = train_halves(rank, dtype, pair, synchronise=True)
        results["not synchronised"] = train_halves(rank, torch.float64, pair, synchronise=False)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the three processes computed."""
    folder = tmp_path_factory.mktemp("processes")
    context = mp.spawn(process, (str(folder),), nprocs=3, join=False)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"the processes did not end in {TIMEOUT_SECONDS} s"
    finally:
        for child in context.processes:
            child.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("name", CASES)
def test_processes_match_plain_batchnorm_on_the_whole_batch(ranks: list[dict[str, Any]], name: str, few: int) -> None:
    case = CASES[name]
    parts = [results[f"{name}, {few}"] for results in ranks[: len(case.shares)]]
    expected = two_steps(case, plain_layer(case), rank=None)
    assert all(part.keys() == expected.keys() for part in parts)
    for key, whole in expected.items():
        tolerance = TOLERANCES.get(whole.dtype, 0)
        tensors = [part[key] for part in parts]
        if key in ("weight gradient", "bias gradient"):
            tensors = [torch.stack(tensors).sum(0)]  # a process has those of its own samples
        elif key not in ("running_mean", "running_var", "num_batches_tracked"):
            tensors = [torch.cat(tensors)]
        for tensor in tensors:
            torch.testing.assert_close(
                tensor, whole, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_on_two_halves_matches_one_process_on_the_whole(
    ranks: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    expected = train(conv_net(dtype), None, dtype)
    for results in ranks[:2]:
        torch.testing.assert_close(
            results[f"synchronised {dtype}"], expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


def test_training_on_two_halves_without_synchronisation_does_not_match(ranks: list[dict[str, Any]]) -> None:
    expected = train(conv_net(torch.float64), None, torch.float64)
    for results in ranks[:2]:
        state = results["not synchronised"]
        for name in ("0.weight", "1.weight", "4.running_mean", "4.running_var"):
            assert (state[name] - expected[name]).abs().max() > 1e-3, name


def test_a_training_step_takes_one_collective_forward_and_one_backward(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["collectives"] == ["c10d::allgather_"] * 2


def test_one_value_per_channel_is_refused_on_all_processes(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["error"] == "expected more than 1 value per channel in training, got 1 on all processes"


@pytest.mark.parametrize("training", [True, False])
def test_one_process_in_a_group_is_plain_batchnorm(group_of_one: None, training: bool) -> None:
    check_equals_plain_batchnorm(training)


@pytest.mark.parametrize("training", [True, False])
def test_without_a_process_group_is_plain_batchnorm(training: bool) -> None:
    check_equals_plain_batchnorm(training)


def check_equals_plain_batchnorm(training: bool) -> None:
    plain = nn.BatchNorm2d(4).train(training)
    sync = convert_sync_batchnorm(copy.deepcopy(plain), CPU)
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(sync(x), plain(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sync.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def test_conversion_keeps_parameters_buffers_names_and_mode() -> None:
    net = nn.Sequential(
        nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Dropout()), nn.BatchNorm3d(5)
    )
    net.append(net[0])  # used twice
    net[1].eval()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    modes = {name: module.training for name, module in net.named_modules()}

    assert convert_sync_batchnorm(convert_sync_batchnorm(net, CPU), CPU) is net
    kept = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert kept.keys() == tensors.keys()
    assert all(kept[name] is tensors[name] for name in tensors)
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert all(type(net.get_submodule(name)) is SyncBatchNorm for name in ("0", "1.0", "2", "3"))
    assert net[0] is net[3]
    assert type(convert_sync_batchnorm(nn.BatchNorm2d(4), CPU)) is SyncBatchNorm


def test_other_devices_get_the_layer_of_torch() -> None:
    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4)), torch.device("cuda"))
    assert type(net[0]) is nn.SyncBatchNorm


def test_state_loads_into_plain_batchnorm_and_back() -> None:
    plain = nn.BatchNorm2d(4)
    plain(torch.randn(3, 4, 5, 5) + 1)
    sync = convert_sync_batchnorm(nn.BatchNorm2d(4), CPU)
    sync.load_state_dict(plain.state_dict())
    other = nn.BatchNorm2d(4)
    other.load_state_dict(sync.state_dict())
    assert list(sync.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_synchronised_layers_with_their_own_state(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    sync = convert_sync_batchnorm(nn.BatchNorm2d(4), CPU)
    twin = duplicate(sync)
    sync(torch.randn(3, 4, 5, 5) + 1)
    assert type(twin) is SyncBatchNorm
    assert twin.num_batches_tracked == 0
    assert torch.equal(twin.running_mean, torch.zeros(4))
