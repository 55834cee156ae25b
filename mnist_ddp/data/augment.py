"""Random affine augmentation of whole batches, on the device that holds them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 0.07  # of the image's side, to either side
ROTATE_DEGREES = 10.0
SCALE = 0.1  # 0.9 to 1.1 times
SHEAR_DEGREES = 5.0


def draw_affine(num_samples: int, generator: torch.Generator) -> Tensor:
    """Random maps from output to input coordinates, one a sample.

    Args:
        num_samples: how many, N.
        generator: a CPU generator; the maps are a function of its state alone.

    Returns:
        (N, 2, 3) float32 in the coordinates of `F.affine_grid`: -1 to 1 from border to border.
    """
    unit = torch.rand(5, num_samples, generator=generator) * 2 - 1  # N values for each parameter, in -1..1
    angle = unit[0] * math.radians(ROTATE_DEGREES)
    shear = (unit[1] * math.radians(SHEAR_DEGREES)).tan()
    scale = 1 / (1 + unit[2] * SCALE)  # maps go from output to input, so a scale above 1 shrinks them
    cos, sin = angle.cos() * scale, angle.sin() * scale
    # rotation x [[1, shear], [0, 1]] | shift; a shift of s sides is 2 s in these coordinates
    rows = [cos, cos * shear - sin, unit[3] * 2 * SHIFT, sin, sin * shear + cos, unit[4] * 2 * SHIFT]
    return torch.stack(rows, dim=1).view(num_samples, 2, 3)


def apply_affine(images: Tensor, affine: Tensor) -> Tensor:
    """Images seen through `affine`, with background (0) beyond their borders.

    Args:
        images: (N, H, W) uint8.
        affine: (N, 2, 3), from `draw_affine`.

    Returns:
        (N, H, W) in 0..1, in the dtype of `affine`.
    """
    height, width = images.shape[1:]
    pixels = images.unsqueeze(1).to(affine.dtype) / 255  # (N, 1, H, W)
    # What F.affine_grid computes, by one product of matrices: it takes 5 ms for 256 digits, this takes 0.5.
    x, y = (
        ((torch.arange(size, device=images.device, dtype=affine.dtype) * 2 + 1) / size - 1) for size in (width, height)
    )
    points = torch.stack([x.repeat(height), y.repeat_interleave(width), torch.ones_like(y).repeat(width)])  # (3, H W)
    grid = (affine.view(-1, 3) @ points).view(-1, 2, height, width).permute(0, 2, 3, 1)  # (N, H, W, 2)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False).squeeze(1)
