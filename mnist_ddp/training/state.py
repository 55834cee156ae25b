"""What a training run changes as it goes, and how it starts."""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mnist_ddp.model.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from mnist_ddp.model.exchange import average_gradients
from mnist_ddp.training.average import WeightAverage
from mnist_ddp.training.checkpoint import Snapshot
from mnist_ddp.training.early_stopping import EarlyStopping
from mnist_ddp.training.evaluation import Evaluation

_PLATEAU_EPOCHS, _PLATEAU_FACTOR = 3, 0.3

Status = Literal["early_stopped", "finished", "target_reached", "diverged", "preempted"]
FINISHED = ("early_stopped", "finished", "target_reached")


@dataclass
class TrainingState:
    """Everything that a step changes.

    Attributes:
        module: the model itself.
        model: the same, prepared by Accelerate: what a step calls.
        average: running average of the model's weights and buffers, which is what is evaluated and saved.
        optimizer: prepared by Accelerate, and in its wrapper where a step may be skipped (fp16).
        stopper: early stopping.
        peak_lr: learning rate after the warm-up.
        warmup_steps: over which it rises to there.
        decay_epochs: by the end of which it has fallen linearly to 0; 0 for never.
        steps_per_epoch, global_batch: optimizer steps, and the images of one over all processes. Their product may be
            less than an epoch's images, and a resumed run may have others than before.
        plateau: whether it falls when the stopper sees no improvement.
        plateau_factor: by which it has fallen so.
        epoch: epochs that are complete.
        step: optimizer steps taken, skipped ones not counted.
        best_weights: state_dict of the average at the best epoch.
        best_epoch: counted from 1; 0 before the first.
        best_val_accuracy: the best epoch's, as a fraction.
        samples_done: of the epoch under way, over all processes.
        loss_sum: () this process's, over its samples of the epoch under way.
        history: metrics of each complete epoch.
        status: why training ended; None while it goes on.
    """

    module: nn.Module
    model: nn.Module
    average: WeightAverage
    optimizer: torch.optim.Optimizer
    stopper: EarlyStopping
    peak_lr: float
    warmup_steps: int
    decay_epochs: int = 0
    steps_per_epoch: int = 1
    global_batch: int = 1
    plateau: bool = False
    plateau_factor: float = 1.0
    epoch: int = 0
    step: int = 0
    best_weights: dict[str, Tensor] | None = None
    best_epoch: int = 0
    best_val_accuracy: float | None = None
    samples_done: int = 0
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    history: list[dict[str, Any]] = field(default_factory=list)
    status: Status | None = None

    def set_learning_rate(self) -> None:
        """Sets the rate of the step to come.

        It rises with the square of the steps taken. Adam's first steps are as long for gradients that are little more
        than rounding as for others; while they are short, runs on different numbers of processes stay together.
        """
        rate = self.peak_lr * self.plateau_factor * min(1.0, (self.step + 1) / (self.warmup_steps + 1)) ** 2
        if self.decay_epochs:
            # By the epochs done, not the steps: those before a resumption may have been of another global batch.
            steps = self.decay_epochs * self.steps_per_epoch
            done = self.epoch * self.steps_per_epoch + self.samples_done // self.global_batch
            rate = min(rate, self.peak_lr * max(0.0, (steps - done) / max(1, steps - self.warmup_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def end_epoch(self, improved: bool) -> None:
        """Lowers the rate for what follows after every third epoch in a row without improvement.

        Epochs of the warm-up take no patience: with few images they are many, and their rates too low to learn from.
        """
        if self.step < self.warmup_steps:
            self.stopper.epochs_without_improvement = 0
        elif self.plateau and not improved and self.stopper.epochs_without_improvement % _PLATEAU_EPOCHS == 0:
            self.plateau_factor *= _PLATEAU_FACTOR

    def result(self, test: Evaluation | None) -> dict[str, Any]:
        """What became of the training, for result.json.

        Args:
            test: of the best weights; None where it was not made.
        """
        return {
            "status": self.status,
            "epochs": self.epoch,
            "steps": self.step,
            "best_epoch": self.best_epoch,
            "best_val_accuracy": self.best_val_accuracy,
            "test_loss": test.loss if test else None,
            "test_accuracy": test.accuracy if test else None,
            "num_test": test.count if test else None,
        }

    def snapshot(self, accelerator: Accelerator, run: dict[str, Any]) -> Snapshot:
        """A copy of the state on the host. All processes must call it together: it gathers their loss sums.

        Args:
            accelerator: of the run.
            run: what identifies the run, JSON values.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            tensors[f"model.{name}"] = tensor
        for name, tensor in self.average.module.state_dict().items():
            tensors[f"average.{name}"] = tensor
        for name, tensor in (self.best_weights or {}).items():
            tensors[f"best.{name}"] = tensor
        optimizer = self.optimizer.state_dict()
        for index, values in optimizer["state"].items():
            for name, tensor in values.items():
                if tensor is not None:  # SGD without momentum
                    tensors[f"optimizer.{index}.{name}"] = tensor
        return Snapshot(
            tensors={name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            values={
                "run": run,
                "epoch": self.epoch,
                "samples_done": self.samples_done,
                "step": self.step,
                "loss_sums": accelerator.gather(self.loss_sum.reshape(1).to(accelerator.device)).tolist(),
                "best_epoch": self.best_epoch,
                "best_val_accuracy": self.best_val_accuracy,
                "history": self.history,
                "stopper": self.stopper.state_dict(),
                "plateau_factor": self.plateau_factor,
                "param_groups": optimizer["param_groups"],
                "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            },
        )

    def restore(self, accelerator: Accelerator, snapshot: Snapshot) -> None:
        """Takes over a snapshot of the same model and optimizer, made with any number of processes."""
        tensors, values = snapshot.tensors, snapshot.values

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.module.load_state_dict(part("model."))
        self.average.module.load_state_dict(part("average."))
        self.best_weights = part("best.") or None
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in part("optimizer.").items():
            index, key = name.split(".", 1)
            moments.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({"state": moments, "param_groups": values["param_groups"]})
        for parameter, moment in self.optimizer.state.items():
            for name, tensor in moment.items():
                if tensor.shape == parameter.shape:
                    # Files hold tensors row by row, parameters are channels_last, and fused optimizers walk through
                    # both in memory order.
                    moment[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        if accelerator.scaler and values["scaler"]:
            accelerator.scaler.load_state_dict(values["scaler"])
        self.stopper.load_state_dict(values["stopper"])
        self.epoch, self.samples_done, self.step = values["epoch"], values["samples_done"], values["step"]
        self.best_epoch, self.best_val_accuracy = values["best_epoch"], values["best_val_accuracy"]
        self.history, self.plateau_factor = values["history"], values["plateau_factor"]
        sums = values["loss_sums"]
        if len(sums) == accelerator.num_processes:  # each goes on with its own: bit for bit the uninterrupted sum
            mine = sums[accelerator.process_index]
        else:
            mine = sum(sums) if accelerator.is_main_process else 0.0
        self.loss_sum = torch.tensor(mine, device=accelerator.device)


def start_training(
    accelerator: Accelerator,
    model: nn.Module,
    stopper: EarlyStopping,
    *,
    optimizer: Literal["sgd", "adamw"],
    lr: float,
    warmup_steps: int,
    momentum: float,
    weight_decay: float,
    ema_decay: float,
    schedule: Literal["plateau", "constant", "linear"] = "constant",
    epochs: int = 0,
    steps_per_epoch: int = 1,
    global_batch: int = 1,
) -> TrainingState:
    """The state before the first step: BatchNorm synchronised, model and optimizer prepared, average like the model.

    Args:
        accelerator: of this run; all processes call this together with equal models.
        model: any module; is changed in place and moved to the accelerator's device.
        stopper: early stopping.
        optimizer, lr, momentum, weight_decay: see `build_optimizer`.
        warmup_steps: over which the learning rate rises to `lr`; at most a quarter of those of a linear schedule.
        schedule: of the rate after that: falls with each plateau of the monitored value, stays, or falls linearly.
        epochs: of the whole run, by whose end a linear schedule reaches 0.
        steps_per_epoch, global_batch: optimizer steps, and the images of one over all processes.
        ema_decay: share of the average that is kept at each step, 0 to 1; 0 makes the average the model itself.
    """
    # The order matters: DDP wraps what it finds, and prepare may move tensors and wrap forward.
    model = convert_sync_batchnorm(model, accelerator.device).to(accelerator.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
    averaged = copy.deepcopy(model)
    built = build_optimizer(
        model,
        optimizer,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        # A fused optimizer skips an overflowed step inside its kernel, where Accelerate does not notice.
        fused=accelerator.scaler is None,
    )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):  # the compiler cannot look through the exchange between processes
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]
    prepared_model, prepared_optimizer = accelerator.prepare(model, built)
    # Synchronised BatchNorm keeps the buffers equal without DDP's broadcast before every forward pass.
    prepared_model.broadcast_buffers = False
    parallel = getattr(prepared_model, "_orig_mod", prepared_model)  # what --compile wraps
    if isinstance(parallel, DistributedDataParallel) and accelerator.device.type == "cpu":
        parallel.register_comm_hook(None, average_gradients)
    average = WeightAverage(averaged, model, ema_decay)
    if schedule == "linear":
        # A run shorter than its warm-up would learn nothing.
        warmup_steps = min(warmup_steps, epochs * steps_per_epoch // 4)
    return TrainingState(
        model,
        prepared_model,
        average,
        without_idle_wrapper(accelerator, prepared_optimizer),
        stopper,
        lr,
        warmup_steps,
        epochs if schedule == "linear" else 0,
        steps_per_epoch,
        global_batch,
        schedule == "plateau",
    )


def without_idle_wrapper(accelerator: Accelerator, prepared: AcceleratedOptimizer) -> torch.optim.Optimizer:
    """The optimizer that a step calls: in Accelerate's wrapper only with a scaler (fp16).

    Without one the wrapper adds nothing to a step but a search of the disk for a package, 0.4 ms, and an inspection of
    a signature. That gradients accumulate before a step is `train_step`'s to see to.
    """
    return prepared if accelerator.scaler else prepared.optimizer


def build_optimizer(
    model: nn.Module, name: Literal["sgd", "adamw"], *, lr: float, momentum: float, weight_decay: float, fused: bool
) -> torch.optim.Optimizer:
    """SGD or AdamW over the parameters of `model`.

    Weight decay acts on filters and matrices only. Biases and BatchNorm parameters, which have one dimension, are left
    alone: pulling them to zero does not shrink the function, it moves it.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=fused)
    return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
