"""Batched augmentation: torchvision's per-image transforms in distribution, and pixel by pixel given the same boxes."""

import math

import pytest
import tiny  # noqa: F401 - one thread
import torch
from scipy.stats import ks_2samp
from torchvision.transforms import ColorJitter
from torchvision.transforms import RandomResizedCrop as PerImageCrop
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from linvit.augment import Augmentation, RandomResizedCrop, color_jitter, flip, jitter_draws

THIRD = (3 / 4, 4 / 3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(n: int, image_size: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(image_size).expand(n, 2)


def cropped(crop: RandomResizedCrop, batch: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    return crop(batch, crop.boxes(sizes(len(batch), batch.shape[-2:]), draws))


def flipped(batch: torch.Tensor, probability: float, draws: torch.Generator) -> torch.Tensor:
    augmentation = Augmentation(RandomResizedCrop(8, (0.2, 1.0), THIRD, "bilinear"), probability, 0.0)
    return flip(batch, augmentation.draw(sizes(len(batch), batch.shape[-2:]), draws).flips)


def jittered(batch: torch.Tensor, strength: float, draws: torch.Generator) -> torch.Tensor:
    return color_jitter(batch, *jitter_draws(len(batch), strength, draws))


def images(n: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, channels, height, width, generator=generator(seed))


# --- crop -------------------------------------------------------------------------------------------------

CROPS = [
    # (image height, width), area, aspect ratio
    ((32, 32), (0.08, 1.0), THIRD),
    ((28, 28), (0.5, 1.0), THIRD),
    ((20, 50), (0.08, 1.0), THIRD),
    ((50, 20), (0.3, 1.0), THIRD),
    ((64, 9), (0.9, 1.0), THIRD),  # hardly ever fits: the central crop
    ((9, 64), (0.9, 1.0), THIRD),
    ((30, 31), (0.99, 1.0), (1.0, 1.0)),
    ((3, 3), (0.01, 0.2), (0.2, 5.0)),
]


@pytest.mark.parametrize(("image_size", "scale", "ratio"), CROPS)
def test_boxes_are_distributed_as_torchvisions(image_size, scale, ratio):
    ours = RandomResizedCrop(8, scale, ratio, "bilinear").boxes(sizes(4000, image_size), generator(1)).double()
    torch.manual_seed(2)
    image = torch.empty(1, *image_size)
    theirs = torch.tensor([PerImageCrop.get_params(image, scale, ratio) for _ in range(4000)]).double()
    for coordinate, name in enumerate(("top", "left", "height", "width")):
        a, b = ours[:, coordinate], theirs[:, coordinate]
        error = 5 * math.sqrt((a.var() + b.var()) / 4000) + 1e-9
        assert abs(a.mean() - b.mean()) <= error, name
        assert abs(a.std() - b.std()) <= 5 * b.std() / math.sqrt(4000) + 0.05 * b.std() + 1e-9, name
        assert ks_2samp(a.numpy(), b.numpy(), method="asymp").pvalue > 1e-4, name


@pytest.mark.parametrize(("image_size", "scale", "ratio"), CROPS)
def test_boxes_are_whole_pixels_inside_the_image(image_size, scale, ratio):
    boxes = RandomResizedCrop(8, scale, ratio, "bilinear").boxes(sizes(2000, image_size), generator())
    assert boxes.shape == (2000, 4)
    assert not boxes.is_floating_point()
    top, left, height, width = boxes.unbind(1)
    assert (top.min() >= 0) & (left.min() >= 0)
    assert (height.min() >= 1) & (width.min() >= 1)
    assert ((top + height) <= image_size[0]).all()
    assert ((left + width) <= image_size[1]).all()


def test_each_image_gets_a_box_of_its_own():
    boxes = RandomResizedCrop(8, (0.08, 1.0), THIRD, "bilinear").boxes(sizes(100, (64, 64)), generator())
    assert len({tuple(box.tolist()) for box in boxes}) > 95


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("image_size", "size", "scale"),
    [
        ((12, 12), 16, (0.08, 1.0)),
        ((32, 32), 16, (0.08, 1.0)),
        ((28, 28), 32, (0.5, 1.0)),
        ((10, 17), 13, (0.3, 1.0)),
        ((16, 16), 16, (1.0, 1.0)),
        ((5, 5), 8, (0.04, 0.1)),
        ((1, 6), 4, (0.5, 1.0)),
    ],
)
def test_pixels_are_torchvisions_given_the_same_boxes(interpolation, channels, image_size, size, scale):
    batch = images(40, channels, *image_size)
    crop = RandomResizedCrop(size, scale, THIRD, interpolation)
    boxes = crop.boxes(sizes(40, image_size), generator(3))
    expected = [
        F.resized_crop(image, *box.tolist(), [size, size], InterpolationMode(interpolation), antialias=False)
        for image, box in zip(batch, boxes, strict=True)
    ]
    torch.testing.assert_close(cropped(crop, batch, generator(3)), torch.stack(expected), atol=1e-5, rtol=0)


def test_the_whole_image_at_its_own_size_is_left_as_it_is():
    batch = images(5, 3, 16, 16)
    crop = RandomResizedCrop(16, (1.0, 1.0), (1.0, 1.0), "bilinear")
    torch.testing.assert_close(cropped(crop, batch, generator()), batch, atol=1e-6, rtol=0)


def test_a_crop_sees_nothing_outside_of_its_box():
    """One bright pixel reaches exactly the outputs of the boxes that hold it."""
    batch = torch.zeros(300, 1, 9, 9)
    batch[:, :, 4, 4] = 1
    for interpolation in ("bilinear", "bicubic"):
        crop = RandomResizedCrop(18, (0.08, 0.5), THIRD, interpolation)
        top, left, height, width = crop.boxes(sizes(300, (9, 9)), generator(5)).unbind(1)
        holds = (top <= 4) & (top + height > 4) & (left <= 4) & (left + width > 4)
        assert 30 < holds.sum() < 270
        reached = cropped(crop, batch, generator(5)).abs().amax((1, 2, 3)) > 0
        assert torch.equal(reached, holds), interpolation


# --- flip -------------------------------------------------------------------------------------------------


def test_an_image_is_mirrored_left_to_right_or_left_alone():
    batch = images(200, 3, 4, 6)
    found = flipped(batch, 0.5, generator())
    mirrored = torch.tensor([torch.equal(one, other.flip(-1)) for one, other in zip(found, batch, strict=True)])
    same = torch.tensor([torch.equal(one, other) for one, other in zip(found, batch, strict=True)])
    assert (mirrored ^ same).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_images_are_mirrored_at_the_rate_asked_for(probability):
    n = 5000
    batch = torch.tensor([0.0, 1.0]).expand(n, 1, 1, 2)
    rate = flipped(batch, probability, generator(1))[:, 0, 0, 0].mean().item()
    assert abs(rate - probability) <= 4 * math.sqrt(probability * (1 - probability) / n)


# --- colour jitter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_factors_fill_one_plus_minus_strength(strength, channels):
    """On a uniform grey image, contrast and saturation change nothing."""
    n, grey = 3000, 0.4
    out = jittered(torch.full((n, channels, 2, 2), grey), strength, generator(2))
    assert (out.amax((1, 2, 3)) - out.amin((1, 2, 3))).max() < 1e-4
    factors = out[:, 0, 0, 0] / grey
    assert 1 - strength - 1e-3 <= factors.min() < 1 - 0.95 * strength
    assert 1 + 0.95 * strength < factors.max() <= 1 + strength + 1e-3
    assert abs(factors.mean() - 1) < 4 * strength / math.sqrt(3 * n)
    assert abs(factors.std() - strength / math.sqrt(3)) < 0.05 * strength


@pytest.mark.parametrize("channels", [1, 3])
def test_contrast_factors_fill_one_plus_minus_strength(channels):
    """Half dark, half light: brightness scales both, so the ratio of half-difference to mean is the contrast's."""
    strength, n = 0.3, 3000
    batch = torch.full((n, channels, 2, 2), 0.35)
    batch[..., 1] = 0.45
    dark, light = jittered(batch, strength, generator(3))[:, 0, 0].unbind(-1)
    factors = ((light - dark) / (light + dark)) / (0.1 / 0.8)
    assert 0.7 - 5e-3 <= factors.min() < 0.72
    assert 1.28 < factors.max() <= 1.3 + 5e-3
    assert abs(factors.mean() - 1) < 0.02


@pytest.mark.parametrize("strength", [0.2, 0.4])
def test_jitter_is_distributed_as_torchvisions(strength):
    """Three statistics of one image, so dim that nothing is clipped and so coloured that saturation matters."""
    n = 1500
    image = 0.15 + 0.25 * images(1, 3, 6, 6)
    image[:, 0] *= 1.4
    ours = jittered(image.expand(n, -1, -1, -1), strength, generator(4))
    torch.manual_seed(5)
    per_image = ColorJitter(strength, strength, strength)
    theirs = torch.stack([per_image(image[0]) for _ in range(n)])
    statistics = {
        "brightness": lambda x: x.mean((1, 2, 3)),
        "contrast": lambda x: x.mean(1).std((1, 2)) / x.mean((1, 2, 3)),
        "saturation": lambda x: (x[:, 0] - x[:, 2]).mean((1, 2)) / x.mean((1, 2, 3)),
    }
    for name, statistic in statistics.items():
        a, b = statistic(ours), statistic(theirs)
        assert b.std() > 0.01, name
        assert ks_2samp(a.numpy(), b.numpy()).pvalue > 1e-3, name
        assert abs(a.mean() - b.mean()) < 5 * math.sqrt((a.var() + b.var()) / n), name


def test_the_three_jitters_come_in_every_order():
    """Bright images are clipped at 1, which makes the order visible: more than one order means more than one end."""
    image = images(1, 3, 8, 8, seed=1) * 0.4 + 0.6
    strength = 0.4
    ours = jittered(image.expand(2000, -1, -1, -1), strength, generator(6))
    torch.manual_seed(7)
    per_image = ColorJitter(strength, strength, strength)
    theirs = torch.stack([per_image(image[0]) for _ in range(2000)])
    for statistic in (
        lambda x: x.mean((1, 2, 3)),
        lambda x: x.std((1, 2, 3)),
        lambda x: (x == 1).float().mean((1, 2, 3)),
    ):
        assert ks_2samp(statistic(ours).numpy(), statistic(theirs).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("strength", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("channels", [1, 3])
def test_jittered_images_stay_within_their_range(strength, channels):
    out = jittered(images(300, channels, 5, 5), strength, generator())
    assert out.min() >= 0
    assert out.max() <= 1
    assert out.shape == (300, channels, 5, 5)


def test_each_image_is_jittered_on_its_own():
    out = jittered(images(1, 3, 5, 5).expand(50, -1, -1, -1), 0.4, generator())
    assert len({tuple(image.flatten().tolist()) for image in out}) == 50


def test_a_grey_image_is_jittered_as_its_three_equal_channels_would_be():
    grey = images(60, 1, 6, 6)
    one = jittered(grey, 0.4, generator(8))
    three = jittered(grey.expand(-1, 3, -1, -1).contiguous(), 0.4, generator(8))
    assert one.shape == grey.shape
    # torchvision's luma weights sum to 0.9999.
    torch.testing.assert_close(three, one.expand(-1, 3, -1, -1), atol=1e-3, rtol=0)


def test_no_strength_changes_nothing():
    batch = images(10, 3, 4, 4)
    torch.testing.assert_close(jittered(batch, 0.0, generator()), batch)


# --- draws ------------------------------------------------------------------------------------------------

AUGMENTATIONS = {
    "crop": lambda batch, draws: cropped(RandomResizedCrop(8, (0.2, 1.0), THIRD, "bilinear"), batch, draws),
    "flip": lambda batch, draws: flipped(batch, 0.5, draws),
    "jitter": lambda batch, draws: jittered(batch, 0.4, draws),
}


@pytest.mark.parametrize("augment", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_draws_come_from_the_generator_that_is_passed_alone(augment):
    batch = images(20, 3, 8, 8)
    torch.manual_seed(0)
    first = augment(batch, generator(1))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(augment(batch, generator(1)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(augment(batch, generator(2)), first)


@pytest.mark.parametrize("augment", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_the_batch_that_comes_in_is_not_changed(augment):
    batch = images(20, 3, 8, 8)
    before = batch.clone()
    augment(batch, generator(1))
    assert torch.equal(batch, before)
