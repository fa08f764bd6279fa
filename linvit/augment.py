"""Random-resized crop, flip and colour jitter on whole batches, drawn for each image on its own.

Equal in distribution to torchvision's per-image transforms, at a fraction of their cost for small images.
All draws come from the generator that is passed in, so that they can be repeated.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torchvision.transforms.v2.functional import rgb_to_grayscale

CROP_TRIES = 10  # as in torchvision


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop boxes of random area and aspect ratio, resized to `size` x `size` pixels."""

    size: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, size, size]."""
        top, left, height, width = self.boxes(len(images), images.shape[-2:], generator).to(images.device).unbind(1)
        rows = _resampling(top, height, self.size, images.shape[-2], self.interpolation)
        columns = _resampling(left, width, self.size, images.shape[-1], self.interpolation)
        return rows[:, None] @ images @ columns[:, None].mT

    def boxes(self, n: int, image_size: tuple[int, int], generator: Generator) -> Tensor:
        """[n, 4] integers: top, left, height, width, the first of ten tries that fits, else a central crop."""
        H, W = image_size
        area = H * W * _uniform((n, CROP_TRIES), *self.scale, generator)
        log_ratio = torch.tensor(self.ratio, dtype=torch.float64).log()
        ratio = _uniform((n, CROP_TRIES), *log_ratio.tolist(), generator).exp()
        widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (widths > 0) & (widths <= W) & (heights > 0) & (heights <= H)
        found, first = fits.any(1), fits.double().argmax(1, keepdim=True)
        central_height, central_width = self._central(H, W)
        height = torch.where(found, heights.gather(1, first)[:, 0], central_height)
        width = torch.where(found, widths.gather(1, first)[:, 0], central_width)
        top = (_uniform((n,), 0, 1, generator) * (H - height + 1)).floor()
        left = (_uniform((n,), 0, 1, generator) * (W - width + 1)).floor()
        top = torch.where(found, top, (H - central_height) // 2)
        left = torch.where(found, left, (W - central_width) // 2)
        return torch.stack([top, left, height, width], dim=1).long()

    def _central(self, H: int, W: int) -> tuple[float, float]:
        low, high = self.ratio
        height = min(H, round(W / low)) if low > W / H else H
        width = min(W, round(H * high)) if high < W / H else W
        return float(height), float(width)


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


def random_flip(images: Tensor, probability: float, generator: Generator) -> Tensor:
    """Mirror each image [B, C, H, W] left to right with this probability."""
    flipped = torch.rand(len(images), generator=generator) < probability
    return torch.where(_per_image(flipped, images), images.flip(-1), images)


def color_jitter(images: Tensor, strength: float, generator: Generator) -> Tensor:
    """Brightness, contrast and saturation, each by a factor in 1 +- strength, in random order: [B, C, H, W] in [0, 1].

    Grey images have no saturation to change.
    """
    factors = _uniform((3, len(images)), max(0.0, 1 - strength), 1 + strength, generator)
    brightness, contrast, saturation = (_per_image(f, images).to(images) for f in factors)
    order = torch.rand(len(images), 3, generator=generator).argsort(1)
    for operation in order.unbind(1):
        chosen = _per_image(operation, images)
        changed = torch.where(chosen == 0, images * brightness, _towards_mean_grey(images, contrast))
        changed = torch.where(chosen == 2, _towards_grey(images, saturation), changed)
        images = changed.clamp(0, 1)
    return images


def _towards_mean_grey(images: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(images).mean((-3, -2, -1), keepdim=True)
    return torch.lerp(mean.expand_as(images), images, factor)


def _towards_grey(images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(_grey(images).expand_as(images), images, factor)


def _grey(images: Tensor) -> Tensor:
    return images if images.shape[-3] == 1 else rgb_to_grayscale(images)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.to(images.device)[:, None, None, None]


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
