"""BatchNorm over the global batch, on CPUs as well.

`torch.nn.SyncBatchNorm` raises on CPU tensors in training as soon as a process group exists, and
DistributedDataParallel refuses CPU modules that hold one or a subclass of it. The layer here computes the same on CPUs,
with one collective forward and one backward.

Legend: N samples, C channels, P processes, K parts of a batch; x of shape (N, C, ...); y = weight xhat + bias with
xhat = (x - mean) / std, and mean, std of a channel over the samples and positions of all processes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mnist_ddp.model.exchange import gather

# Values in a row, and values of a channel: see `_rows`.
_LONGEST_ROW, _FEW = 1024, 16384


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d whose statistics in training are those of the samples of all processes.

    Processes may hold different numbers of samples, or none. In evaluation, with one process and without a process
    group it is plain BatchNorm. Parameters, buffers and state_dict are BatchNorm's. As with `nn.SyncBatchNorm`, the
    gradients of weight and bias are those of the process's own samples, for DDP to average.

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
            ValueError: on all processes, in training, if they hold fewer than two values per channel together; with one
                process, as BatchNorm does.
        """
        group = None
        if self.training and dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
        if group is None or group.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        mean_C, var_C, count = global_statistics(input.detach(), group)
        if count < 2:
            raise ValueError(f"expected more than 1 value per channel in training, got {count} on all processes")
        if self.track_running_stats:
            running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
            assert running_mean is not None
            assert running_var is not None
            assert batches is not None
            batches.add_(1)
            factor = 1 / batches.item() if self.momentum is None else self.momentum
            running_mean.lerp_(mean_C.to(running_mean.dtype), factor)
            running_var.lerp_((var_C * (count / (count - 1))).to(running_var.dtype), factor)
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
        rows, folds, _ = _rows(input)
        # The running statistics passed here only set the dtype of the result: momentum 0 leaves them alone.
        unused = None if dtype == input.dtype else input.new_empty(folds * C, dtype=dtype)
        mean_C, var_C, *_ = torch.batch_norm_update_stats(rows, unused, unused, 0.0)
        if folds > 1:
            mean_C, var_C = _pool(mean_C.view(folds, C), var_C.view(folds, C))
    else:
        mean_C = var_C = input.new_zeros(C, dtype=dtype)
    messages_P2C, counts = gather([mean_C, var_C], group, count)
    means_PC, vars_PC = messages_P2C.unbind(1)
    return *_pool(means_PC, vars_PC, counts), sum(counts)


def _pool(means_KC: Tensor, vars_KC: Tensor, counts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of K parts together, which have so many values each; none given: equally many.

    The variance is the mean of the variances and the variance of the means, both without differences of large numbers.
    """
    if counts and min(counts) < max(counts):
        shares_K1 = means_KC.new_tensor(counts).unsqueeze(1) / sum(counts)
        mean_C = (shares_K1 * means_KC).sum(0)
        return mean_C, (shares_K1 * (vars_KC + (means_KC - mean_C).square())).sum(0)
    mean_C = _sum(means_KC) / len(means_KC)
    offsets_KC = means_KC - mean_C
    return mean_C, _sum(torch.addcmul(vars_KC, offsets_KC, offsets_KC)).div_(len(vars_KC))


def _sum(parts: Tensor) -> Tensor:
    """(K, ...) to (...), over the parts. For a few parts, additions take a third of the time of a reduction."""
    return parts.sum(0) if len(parts) > 8 else functools.reduce(torch.add, parts.unbind())


def _rows(values: Tensor) -> tuple[Tensor, int, bool]:
    """(N, C, ...) as (M, F C), F consecutive values of each channel beside each other; also F, and if it is a view.

    It is one of values that lie channels_last in memory; others are copied.

    The native kernels add up a channel's values one by one, in fp32, and are slow on short rows. Over 50,000 values of
    16 channels the variance is off by 1.3e-5; in 64 parts by 2e-6, in a third of the time. Parts have to be put
    together, which costs more than it gains where there are few values or many channels.

    F is the largest divisor of the number of values up to _LONGEST_ROW / C, and 1 for up to _FEW values.
    """
    shape, strides, dense = _layout(values.shape, values.stride(), _FEW)
    # reshape alone may return a view whose rows lie apart, and what is computed from it would lie as they do.
    rows = values.as_strided(shape, strides) if dense else values.movedim(1, -1).reshape(shape).contiguous()
    return rows, shape[1] // values.size(1), dense


@functools.lru_cache(1024)  # finding out takes as long as the kernels
def _layout(shape: torch.Size, strides: tuple[int, ...], few: int) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Shape and strides of the rows, and whether the values lie channels_last in memory, so that a view gives them.

    Up to `few` values of a channel are left in one part; 0 for parts in any case.
    """
    values = torch.empty_strided(shape, strides, device="meta")
    C = shape[1]
    count = values.numel() // C
    most = max(1, _LONGEST_ROW // C) if count > few else 1
    folds = next(F for F in range(most, 0, -1) if count % F == 0)
    return (count // folds, folds * C), (folds * C, 1), values.movedim(1, -1).is_contiguous()


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
        ctx.save_for_backward(input, weight, mean_C, torch.rsqrt(var_C + eps))
        ctx.count, ctx.eps, ctx.group = count, eps, group
        weight_C, bias_C = (None if p is None else p.to(mean_C.dtype) for p in (weight, bias))
        shape, strides, dense = _layout(input.shape, input.stride(), _FEW)
        folds = shape[1] // input.size(1)
        if folds > 1 and dense and weight_C is not None and bias_C is not None:
            weight_F, bias_F, mean_F, var_F = torch.stack([weight_C, bias_C, mean_C, var_C]).repeat(1, folds).unbind()
            # Not a view that is made here: autograd would refuse the ReLU that writes to it.
            output, unused = torch.empty_like(input), mean_C.new_empty(0)
            rows, out = input.as_strided(shape, strides), (output.as_strided(shape, strides), unused, unused)
            torch.native_batch_norm(rows, weight_F, bias_F, mean_F, var_F, False, 0.0, eps, out=out)
            return output
        return torch.batch_norm(input, weight_C, bias_C, mean_C, var_C, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """With g = dL/dy, sums over the own samples and means over those of all processes:

            dL/dbias = sum(g),  dL/dweight = sum(g xhat),
            dL/dx = weight / std (g - mean(g) - xhat mean(g xhat))

        Ioffe and Szegedy, "Batch Normalization" (2015), section 3.
        """
        input, weight, mean_C, invstd_C = ctx.saved_tensors
        C = input.size(1)
        (x, folds, dense), (g, *_) = _rows(input), _rows(grad_output)
        if input.numel() > 0:
            mean, invstd = mean_C, invstd_C
            if folds > 1:
                mean, invstd = torch.stack([mean_C, invstd_C]).repeat(1, folds).unbind()
            # Only the kernel's two reductions: its gradient of the input would take the means over the own samples.
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                g, x, None, None, None, mean, invstd, True, ctx.eps, [False, True, True]
            )
            if folds > 1:
                grad_weight, grad_bias = torch.stack([grad_weight, grad_bias]).view(2, folds, C).sum(1).unbind()
        else:
            grad_weight, grad_bias = mean_C.new_zeros(2, C).unbind()

        grad_input = None
        if ctx.needs_input_grad[0]:
            # dL/dx = a g + b x + c. c makes up for the rounding of a and b to half precision.
            sums_2C = _sum(gather([grad_weight, grad_bias], ctx.group)[0])
            a_C = invstd_C if weight is None else invstd_C * weight
            a_C = a_C.to(input.dtype)
            gxhat_C, g_C = (sums_2C * a_C).div_(-ctx.count).unbind()
            b_C = (gxhat_C * invstd_C).to(input.dtype)
            c_C = torch.addcmul(g_C, b_C, mean_C, value=-1).to(input.dtype)
            # Long rows also where values are few: with 24 in a row, addcmul takes seven times as long in bf16.
            shape, *_ = _layout(input.shape, input.stride(), 0)
            if shape[1] > C:
                a_C, b_C, c_C = torch.stack([a_C, b_C, c_C]).repeat(1, shape[1] // C).unbind()
            rows = torch.addcmul(c_C, g.reshape(shape), a_C).addcmul_(x.reshape(shape), b_C)
            if dense:
                grad_input = rows.as_strided(input.shape, input.stride())
            else:
                grad_input = rows.view(input.movedim(1, -1).shape).movedim(-1, 1)
        _, weight_needs_grad, bias_needs_grad, *_ = ctx.needs_input_grad
        return (
            grad_input,
            grad_weight if weight_needs_grad else None,
            grad_bias if bias_needs_grad else None,
            *(None, None, None, None, None),
        )
