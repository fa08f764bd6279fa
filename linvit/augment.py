"""Random-resized crop, flip and colour jitter on whole batches, drawn for each image on its own.

Equal in distribution to torchvision's per-image transforms, at a fraction of their cost for small images. All draws
are made on the CPU, from the generator that is passed in, so that they can be repeated; none of them is read back from
a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import permutations

import torch
from torch import Generator, Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize, rgb_to_grayscale

from linvit.device import to_device

CROP_TRIES = 10  # as in torchvision


@dataclass(frozen=True)
class Draws:
    """What chance decided for each image of a batch, on the CPU."""

    boxes: Tensor
    """[B, 4] integers: top, left, height, width."""
    flips: Tensor
    """[B] booleans."""
    factors: Tensor
    """[B, 3]: of brightness, contrast and saturation."""
    orders: Tensor
    """[B, 3]: a permutation of these three."""

    def __getitem__(self, part: slice) -> "Draws":
        """Those of a part of the images."""
        return Draws(self.boxes[part], self.flips[part], self.factors[part], self.orders[part])

    @classmethod
    def joined(cls, parts: "Sequence[Draws]") -> "Draws":
        """Those of several batches as of one."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop boxes of random area and aspect ratio, resized to `size` x `size` pixels."""

    size: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str

    def __call__(self, images: Tensor, boxes: Tensor) -> Tensor:
        """[B, C, H, W] and their boxes [B, 4] -> [B, C, size, size]; without antialiasing: for small images."""
        top, left, height, width = to_device(boxes, images.device).unbind(1)
        rows = _resampling(top, height, self.size, images.shape[-2], self.interpolation)
        columns = _resampling(left, width, self.size, images.shape[-1], self.interpolation)
        return rows[:, None] @ images @ columns[:, None].mT

    def single(self, image: Tensor, box: Tensor) -> Tensor:
        """One image of any size, uint8 [C, H, W] -> uint8 [C, size, size], antialiased as Pillow does it."""
        top, left, height, width = box.tolist()
        cropped = image[:, top : top + height, left : left + width]
        return resize(cropped, [self.size, self.size], InterpolationMode(self.interpolation), antialias=True)

    def boxes(self, sizes: Tensor, generator: Generator) -> Tensor:
        """Boxes [B, 4] in images of these heights and widths [B, 2]: top, left, height, width.

        The first of ten tries that fits, else a central crop.
        """
        n, (H, W) = len(sizes), sizes.unbind(1)
        area = (H * W)[:, None] * _uniform((n, CROP_TRIES), *self.scale, generator)
        low, high = torch.tensor(self.ratio, dtype=torch.float64).log().tolist()
        ratio = _uniform((n, CROP_TRIES), low, high, generator).exp()
        widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (widths > 0) & (widths <= W[:, None]) & (heights > 0) & (heights <= H[:, None])
        found, first = fits.any(1), fits.double().argmax(1, keepdim=True)
        central_height, central_width = self._central(H.double(), W.double())
        height = torch.where(found, heights.gather(1, first)[:, 0], central_height)
        width = torch.where(found, widths.gather(1, first)[:, 0], central_width)
        top = (_uniform((n,), 0, 1, generator) * (H - height + 1)).floor()
        left = (_uniform((n,), 0, 1, generator) * (W - width + 1)).floor()
        top = torch.where(found, top, (H - central_height).div(2, rounding_mode="floor"))
        left = torch.where(found, left, (W - central_width).div(2, rounding_mode="floor"))
        return torch.stack([top, left, height, width], dim=1).long()

    def _central(self, H: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.ratio
        height = torch.where(low > W / H, (W / low).round().minimum(H), H)
        width = torch.where(high < W / H, (H * high).round().minimum(W), W)
        return height, width


@dataclass(frozen=True)
class Augmentation:
    """A crop, a flip with some probability, and colour jitter of some strength, for images in [0, 1]."""

    crop: RandomResizedCrop
    flip: float
    jitter: float

    def draw(self, sizes: Tensor, generator: Generator) -> Draws:
        """For images of these heights and widths [B, 2]."""
        boxes = self.crop.boxes(sizes, generator)
        return Draws(
            boxes,
            torch.rand(len(sizes), generator=generator) < self.flip,
            *jitter_draws(len(sizes), self.jitter, generator),
        )

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """[B, C, H, W] -> [B, C, size, size]."""
        return self.finish(self.crop(images, draws.boxes).clamp_(0, 1), draws)

    def finish(self, images: Tensor, draws: Draws) -> Tensor:
        """What follows the crop."""
        images = flip(images, draws.flips)
        return color_jitter(images, draws.factors, draws.orders) if self.jitter else images


def _resampling(start: Tensor, length: Tensor, size: int, extent: int, interpolation: str) -> Tensor:
    """[B, size, extent] matrices that resize `length` pixels from `start` on, along one side, to `size` pixels.

    What lies outside of the crop is as if its border went on, as when a cropped image is resized.
    """
    centres = (torch.arange(size, device=start.device) + 0.5) / size
    position = length[:, None] * centres - 0.5
    first = position.floor()
    matrix = torch.zeros(len(start), size, extent, device=start.device)
    for tap in (0, 1) if interpolation == "bilinear" else (-1, 0, 1, 2):
        weight = KERNELS[interpolation]((position - first - tap).abs())
        pixel = (first.long() + tap).clamp(torch.zeros_like(length)[:, None], length[:, None] - 1)
        matrix.scatter_add_(2, (start[:, None] + pixel)[..., None], weight[..., None])
    return matrix


def _linear(distance: Tensor) -> Tensor:
    return 1 - distance


def _cubic(distance: Tensor, a: float = -0.75) -> Tensor:
    """Keys' kernel, with torch's parameter."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, far)


KERNELS = {"bilinear": _linear, "bicubic": _cubic}


def flip(images: Tensor, flips: Tensor) -> Tensor:
    """Mirror the chosen ones of the images [B, C, H, W] left to right."""
    chosen = to_device(flips.nonzero()[:, 0], images.device)
    return images.index_copy(0, chosen, images[chosen].flip(-1))


def jitter_draws(n: int, strength: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Factors [n, 3] in 1 +- strength of brightness, contrast and saturation, and the orders [n, 3] they come in."""
    factors = _uniform((3, n), max(0.0, 1 - strength), 1 + strength, generator)
    return factors.mT, torch.rand(n, 3, generator=generator).argsort(1)


def color_jitter(images: Tensor, factors: Tensor, orders: Tensor) -> Tensor:
    """Brightness, contrast and saturation, each by the image's factor, in its order: [B, C, H, W] in [0, 1].

    Grey images have no saturation to change.
    """
    jittered = torch.empty_like(images)
    # Images of one order go together, so that each goes through three operations and not through nine.
    for order in permutations(range(3)):
        members = (orders == torch.tensor(order)).all(1).nonzero()[:, 0]
        by = to_device(factors[members].to(images.dtype), images.device)
        chosen = to_device(members, images.device)
        group = images[chosen]
        for number in order:
            group = ADJUSTMENTS[number](group, by[:, number, None, None, None]).clamp_(0, 1)
        jittered.index_copy_(0, chosen, group)
    return jittered


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return images * factor


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(images).mean((-3, -2, -1), keepdim=True)
    return torch.lerp(mean.expand_as(images), images, factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    if images.shape[-3] == 1:
        return images
    return torch.lerp(_grey(images).expand_as(images), images, factor)


ADJUSTMENTS = (_brightness, _contrast, _saturation)


def _grey(images: Tensor) -> Tensor:
    return images if images.shape[-3] == 1 else rgb_to_grayscale(images)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
