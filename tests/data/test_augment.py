"""Augmentation: affine maps against what is known of a picture that they move.

python -m pytest tests/data/test_augment.py
"""

import math

import pytest
import torch
from torch import Tensor

from mnist_ddp.data.augment import ROTATE_DEGREES, SCALE, SHEAR_DEGREES, SHIFT, apply_affine, draw_affine

SIZES = [(28, 28), (7, 12), (1, 1), (33, 20)]
IDENTITY = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def noise(n: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (n, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def draw(n: int, seed: int = 0) -> Tensor:
    return draw_affine(n, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_identity_gives_the_image_back(height: int, width: int, dtype: torch.dtype) -> None:
    images = noise(3, height, width)
    result = apply_affine(images, IDENTITY.to(dtype).repeat(3, 1, 1))
    assert result.dtype == dtype
    torch.testing.assert_close(result, images.to(dtype) / 255, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, 1), (-2, 3), (4, -1)])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (7, 12)])
def test_a_shift_by_whole_pixels_moves_them(height: int, width: int, down: int, right: int) -> None:
    image = noise(1, height, width)
    shift = IDENTITY.double().clone()
    # Maps go from output to input, and a side is 2 long.
    shift[:, 2] = torch.tensor([-2 * right / width, -2 * down / height], dtype=torch.float64)
    expected = torch.zeros(height + 8, width + 8, dtype=torch.float64)
    expected[4 + down : 4 + down + height, 4 + right : 4 + right + width] = image[0].double() / 255
    result = apply_affine(image, shift.unsqueeze(0))
    torch.testing.assert_close(result[0], expected[4 : 4 + height, 4 : 4 + width], rtol=0, atol=1e-9)


def test_a_quarter_turn_turns_the_image() -> None:
    image = noise(1, 9, 9)
    turn = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    # Output (x, y) comes from input (-y, x): right of the output is the bottom of the input.
    torch.testing.assert_close(
        apply_affine(image, turn)[0], image[0].double().rot90(1, (0, 1)) / 255, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_equals_the_grid_of_torch(height: int, width: int) -> None:
    images, affine = noise(16, height, width), draw(16).double()
    grid = torch.nn.functional.affine_grid(affine, [16, 1, height, width], align_corners=False)
    expected = torch.nn.functional.grid_sample(images.unsqueeze(1).double() / 255, grid, align_corners=False)
    torch.testing.assert_close(apply_affine(images, affine), expected.squeeze(1), rtol=0, atol=1e-9)


def test_background_stays_background_and_values_stay_in_range() -> None:
    images = noise(200, 28, 28)
    images[:, :4], images[:, -4:], images[:, :, :4], images[:, :, -4:] = 0, 0, 0, 0
    result = apply_affine(images, draw(200))
    assert result.min() == 0
    assert 0.5 < result.max() <= 1
    assert not apply_affine(torch.zeros_like(images), draw(200)).any()
    corners = apply_affine(torch.full_like(images, 255), draw(200))[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 0).any()  # what comes in from beyond the border is background too


def test_maps_stay_within_their_limits_and_use_them() -> None:
    """Takes the drawn maps apart again: rotation times shear, scale, shift."""
    a, b, c, d = draw(20_000).double()[:, :, :2].flatten(1).unbind(1)
    scale = 1 / torch.hypot(a, c)
    rotation = torch.atan2(c, a) * 180 / math.pi
    shear = torch.atan((a * b + c * d) * scale**2) * 180 / math.pi
    shift_x, shift_y = draw(20_000)[:, :, 2].double().unbind(1)
    for values, limit, middle in (
        (scale, SCALE, 1),
        (rotation, ROTATE_DEGREES, 0),
        (shear, SHEAR_DEGREES, 0),
        (shift_x / 2, SHIFT, 0),
        (shift_y / 2, SHIFT, 0),
    ):
        away = (values - middle) / limit
        assert away.abs().max() == pytest.approx(1, abs=1e-3)
        assert abs(away.mean()) < 0.02
        assert away.std() == pytest.approx(1 / math.sqrt(3), abs=0.02)  # uniform
    drawn = torch.stack([scale, rotation, shear, shift_x, shift_y])
    assert (torch.corrcoef(drawn) - torch.eye(5)).abs().max() < 0.05  # independent of one another


def test_maps_are_a_function_of_the_generator() -> None:
    torch.manual_seed(1)
    one = draw(10, seed=3)
    torch.manual_seed(2)
    assert torch.equal(one, draw(10, seed=3))
    assert not torch.equal(one, draw(10, seed=4))
    assert len(one.unique(dim=0)) == 10  # each image has its own
