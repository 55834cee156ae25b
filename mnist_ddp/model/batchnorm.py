"""BatchNorm over the global batch, on CPUs as well.

`torch.nn.SyncBatchNorm` raises on CPU tensors in training as soon as a process group exists, and
DistributedDataParallel refuses CPU modules that hold one or a subclass of it. The layer here computes the same on CPUs,
with one collective forward and one backward.

Legend: N samples, C channels, P processes; x of shape (N, C, ...); y = weight xhat + bias with xhat = (x - mean) / std,
and mean, std of a channel over the samples and positions of all processes.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mnist_ddp.model.exchange import gather


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d whose statistics in training are those of the samples of all processes.

    Processes may hold different numbers of samples, or none. In evaluation it is plain BatchNorm; with one process, or
    no process group, it computes the same as plain BatchNorm with less rounding, see `_rows`. Parameters,
    buffers and state_dict are BatchNorm's. As with `nn.SyncBatchNorm`, the gradients of weight and bias are those of
    the process's own samples, for DDP to average.

    Attributes:
        process_group: the processes that share statistics; None means all. In training they call the layer together.
    """

    process_group: Any = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input, got {input.dim()}D")

    def forward(self, input: Tensor) -> Tensor:
        """Maps (N, C, ...) to the same shape and dtype.

        Raises:
            ValueError: on all processes, in training, if they hold fewer than two values per channel together.
        """
        if not self.training:
            return super().forward(input)
        group = None
        if dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
            if dist.get_world_size(group) == 1:
                group = None
        self._check_input_dim(input)
        mean_C, var_C, count = global_statistics(input.detach(), group)
        if count < 2:
            raise ValueError(f"expected more than 1 value per channel in training, got {count} on all processes")
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((var_C * (count / (count - 1))).to(self.running_var.dtype), factor)
        return _Normalize.apply(input, self.weight, self.bias, mean_C, var_C, count, self.eps, group)


def convert_sync_batchnorm(module: nn.Module, device: torch.device, process_group: Any = None) -> nn.Module:
    """Makes every BatchNorm in `module` a synchronised one, and returns the module. Call it before `prepare`.

    On CPUs the layers become `SyncBatchNorm` where they are, with their parameters, buffers, hooks and names.
    On other devices `nn.SyncBatchNorm` takes their places.

    Args:
        device: where the module will train; it need not be there yet.
        process_group: the processes that share statistics; None means all.
    """
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
            # As torch's lazy modules do: whoever holds the layer, its parameters or its hooks keeps them.
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
            layer.process_group = process_group
    return module


def global_statistics(input: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Returns mean (C,), biased variance (C,) and the number of values per channel over all processes of `group`.

    The statistics have the dtype of `input`, fp32 at least. All processes compute them from the same numbers in the
    same order, so they are identical everywhere.
    """
    C, dtype = input.size(1), torch.promote_types(input.dtype, torch.float32)
    count = input.numel() // C
    if count > 0:
        rows, folds = _rows(input)
        # The running statistics passed here only set the dtype of the result: momentum 0 leaves them alone.
        unused = input.new_empty(rows.size(1), dtype=dtype)
        parts = torch.stack(torch.batch_norm_update_stats(rows, unused, unused, 0.0)).double()
        means_FC, vars_FC = parts.view(2, folds, C).unbind()
        # Squares lose the digits of the variance where |mean| >> std; in float64 they keep all that fp32 has.
        squares_FC = vars_FC.addcmul(means_FC, means_FC)
        moments = torch.cat([means_FC, squares_FC], dim=1).mean(0)  # of x and x^2, (2 C,)
    else:
        moments = input.new_zeros(2 * C, dtype=torch.float64)
    if group is not None:
        sums = gather(torch.cat([moments * count, moments.new_full((1,), count)]), group).sum(0)
        count = int(sums[-1])
        moments = sums[:-1] / count
    mean_C, squares_C = moments.chunk(2)
    var_C = squares_C.addcmul(mean_C, mean_C, value=-1).clamp_(min=0)
    return mean_C.to(dtype), var_C.to(dtype), count


def _rows(input: Tensor) -> tuple[Tensor, int]:
    """Views (N, C, ...) as (M, F C), F consecutive values of each channel beside each other; also returns F.

    The native kernels add channels_last values up one by one in fp32: over 240x196 of them the variance is off by
    1.3e-5. In F parts, whose results are added in float64, it is off by 2e-6, and long rows make the kernels faster.
    Without this, runs with different numbers of processes, whose sums have different lengths, would differ a hundred
    times more than rounding makes them.

    F is the largest divisor of the number of values up to 64. Values that do not lie channels_last in memory stay as
    they are, with F = 1.
    """
    last = input.movedim(1, -1)
    if not last.is_contiguous():
        return input, 1
    C = input.size(1)
    count = input.numel() // C
    folds = next(F for F in range(64, 0, -1) if count % F == 0)
    return last.reshape(-1, folds * C), folds


class _Normalize(torch.autograd.Function):
    """y = weight xhat + bias, differentiated also through the mean and variance that all processes share."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_C: Tensor,
        var_C: Tensor,
        count: int,
        eps: float,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean_C, var_C)
        ctx.count, ctx.eps, ctx.group = count, eps, group
        weight_C, bias_C = (None if p is None else p.to(mean_C.dtype) for p in (weight, bias))
        return F.batch_norm(input, mean_C, var_C, weight_C, bias_C, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """With g = dL/dy, sums over the own samples and means over those of all processes:

            dL/dbias = sum(g),  dL/dweight = sum(g xhat),
            dL/dx = weight / std (g - mean(g) - xhat mean(g xhat))

        Ioffe and Szegedy, "Batch Normalization" (2015), section 3.
        """
        input, weight, mean_C, var_C = ctx.saved_tensors
        invstd_C = (var_C + ctx.eps).rsqrt()
        C = len(mean_C)
        if grad_output.stride() != input.stride():  # the kernel takes ten times longer on two memory formats
            grad_output = torch.empty_like(input).copy_(grad_output)
        x, folds = _rows(input)
        g = grad_output if x is input else grad_output.movedim(1, -1).reshape(x.shape)
        if input.numel() > 0:
            # Only the kernel's two reductions: its gradient of the input would take the means over the own samples.
            _, gxhat, g_sum = torch.ops.aten.native_batch_norm_backward(
                *(g, x, None, None, None, mean_C.repeat(folds), invstd_C.repeat(folds)),
                *(True, ctx.eps, [False, True, True]),
            )
            sums_2C = torch.stack([gxhat, g_sum]).double().view(2, folds, C).sum(1)
        else:
            sums_2C = mean_C.new_zeros(2, C, dtype=torch.float64)
        grad_weight, grad_bias = sums_2C.to(mean_C.dtype)

        grad_input = None
        if ctx.needs_input_grad[0]:
            if ctx.group is not None:
                sums_2C = gather(sums_2C.view(-1), ctx.group).sum(0).view(2, C)
            mean_gxhat_C, mean_g_C = sums_2C / ctx.count
            # dL/dx = a g + b x + c. c makes up for the rounding of a and b to half precision.
            a_C = invstd_C.double() if weight is None else invstd_C.double() * weight
            b_C = (a_C * mean_gxhat_C * -invstd_C).to(input.dtype)
            a_C = a_C.to(input.dtype)
            c_C = -(a_C * mean_g_C + b_C * mean_C.double())
            a, b, c = _beside(torch.stack([a_C, b_C, c_C.to(input.dtype)]), x, folds)
            grad_input = torch.addcmul(c, g, a).addcmul_(x, b)
            if x is not input:
                grad_input = grad_input.view(input.movedim(1, -1).shape).movedim(-1, 1)
        _, weight_needs_grad, bias_needs_grad, *_ = ctx.needs_input_grad
        return (
            grad_input,
            grad_weight if weight_needs_grad else None,
            grad_bias if bias_needs_grad else None,
            *(None, None, None, None, None),
        )


def _beside(values_KC: Tensor, rows: Tensor, folds: int) -> Tensor:
    """Shapes values of each channel so that they broadcast over `rows`, the first result of `_rows`, K times.

    Over long rows: (C, 1, 1) beside channels_last values takes several times longer, for inner loops of C elements.
    """
    K = len(values_KC)
    return values_KC.repeat(1, folds).view(K, 1, -1, *[1] * (rows.dim() - 2))
