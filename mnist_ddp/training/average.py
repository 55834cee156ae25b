"""The running average of a model's weights: what is evaluated and saved."""

import torch
from torch import Tensor, nn


class WeightAverage:
    """An exponential moving average of weights and BatchNorm statistics.

    At step t it keeps min(decay, (1 + t) / (10 + t)) of itself, so that the random first weights are soon forgotten:
    the formula of tf.train.ExponentialMovingAverage. (`torch.optim.swa_utils.AveragedModel` keeps t on the device, and
    would wait for it in each step.)

    Args:
        module: a copy of the model, which becomes the average.
        model: what to average. Its tensors must stay where they are: after `prepare`, which may move them.
        decay: 0 to 1; 0 makes the average the model itself.
    """

    def __init__(self, module: nn.Module, model: nn.Module, decay: float) -> None:
        self.module = module.eval().requires_grad_(False)
        self.decay = decay
        self._averages, self._values = _floating(module), _floating(model)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the model's weights after optimizer step `step`, counted from 0."""
        kept = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._values, 1 - kept)


def _floating(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, without BatchNorm's count of batches, which only training reads."""
    return [tensor.detach() for tensor in module.state_dict().values() if tensor.is_floating_point()]
