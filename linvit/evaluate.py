"""What a trained model is worth: accuracy, parameters, FLOPs, throughput."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linvit.config import Interrupted, RunEnded, Size
from linvit.data import Batch
from linvit.device import autocast
from linvit.ranks import Ranks


class NotANumber(RunEnded):
    """The model answers NaN, and so has no accuracy: of equal logits, the first would count as its answer."""


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: str = "float32",
    ranks: Ranks = Ranks(),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent, over the images of all ranks.

    Raises:
        NotANumber: a logit is NaN.
        Interrupted: `stop`, which is asked between batches, was true on a rank.
    """
    model.eval()
    device = next(model.parameters()).device
    counts, images, stopped = torch.zeros(3, dtype=torch.long, device=device), 0, False
    for inputs, labels in batches:
        if images and (stopped := stop()):
            break
        labels = labels.to(device, non_blocking=True)
        with autocast(device, precision):
            logits = model(inputs.to(device, non_blocking=True))
        ranked = logits.float().topk(min(5, logits.shape[-1])).indices == labels[:, None]
        counts += torch.stack([ranked[:, 0].sum(), ranked.sum(), logits.isnan().any(-1).sum()])
        images += len(labels)
    if ranks.any(stopped):  # asked once, at the end of each share: they need not have the same number of batches
        raise Interrupted("stopped in an evaluation")
    shares = ranks.sum(counts).double() / ranks.sum(torch.tensor(images)).item()
    top1, top5, unanswered = (100 * shares).tolist()
    if unanswered:
        raise NotANumber(f"the model's logits are NaN for {unanswered:.3g} % of the test images: it has no accuracy")
    return {"top1": top1, "top5": top5}


def count_parameters(model: nn.Module) -> int:
    """All parameters, fixed ones too."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def count_flops(model: nn.Module, size: Size) -> int:
    """Floating-point operations of one image's forward pass, matrix products and convolutions counted."""
    image = torch.zeros(1, size.channels, size.image_size, size.image_size, device=next(model.parameters()).device)
    # Fused attention kernels are opaque to the counter; the plain one has the same products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(image)
    return counter.get_total_flops()


@torch.inference_mode()
def images_per_second(model: nn.Module, size: Size, *, batch_size: int = 128, repeats: int = 5) -> float:
    """Forward passes of random images, the median of a few batches after one to warm up."""
    device = next(model.parameters()).device
    images = torch.randn(batch_size, size.channels, size.image_size, size.image_size, device=device)
    model.eval()
    return batch_size / median_seconds(lambda: model(images), device, repeats=repeats)


def median_seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """What a call takes on the device, the median of a few after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[repeats // 2]
