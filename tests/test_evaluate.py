"""What a model is worth: accuracies by hand, operations by formula, a clock under control."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CLASSES, RGB, SIZE, STUDY, changed
from torch import nn

from linvit.config import Interrupted, Size
from linvit.evaluate import count_flops, count_parameters, evaluate, images_per_second
from linvit.vit import build_vit


class Answers(nn.Module):
    """Gives its inputs back as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append((self.training, torch.is_inference_mode_enabled()))
        return x


def scored(logits: list[list[float]], labels: list[int], batch_size: int = 100) -> dict[str, float]:
    pairs = zip(torch.tensor(logits).split(batch_size), torch.tensor(labels).split(batch_size), strict=True)
    return evaluate(Answers(), list(pairs))


# --- accuracy ---------------------------------------------------------------------------------------------

SEVEN = [
    [9, 8, 7, 6, 5, 4, 3],  # ranks: 0 1 2 3 4 | 5 6
    [3, 4, 5, 6, 7, 8, 9],  # ranks: 6 5 4 3 2 | 1 0
    [0, 0.5, -1, 2, -3, 1, -2],  # ranks: 3 5 1 0 2 | 6 4
    [-5, -4, -3, -2, -1, -9, -8],  # ranks: 4 3 2 1 0 | 6 5
]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize(
    ("labels", "top1", "top5"),
    [
        ([0, 6, 3, 4], 100, 100),
        ([1, 6, 3, 4], 75, 100),
        ([4, 2, 2, 0], 0, 100),
        ([5, 1, 6, 6], 0, 0),
        ([0, 1, 5, 5], 25, 50),
        ([5, 6, 4, 0], 25, 50),
    ],
)
def test_top_1_and_top_5_are_those_counted_by_hand(labels, top1, top5, batch_size):
    assert scored(SEVEN, labels, batch_size) == {"top1": top1, "top5": top5}


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5])
def test_with_five_classes_or_fewer_top_5_is_certain(classes):
    logits = torch.randn(20, classes, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % classes
    found = evaluate(Answers(), [(logits, labels)])
    assert found["top5"] == 100
    assert found["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 15), st.integers(0, 10**6))
def test_accuracies_are_shares_of_all_images_whatever_the_batches(n, classes, batch_size, seed):
    generator = np.random.default_rng(seed)
    logits = generator.permuted(np.tile(np.arange(classes, dtype=np.float32), (n, 1)), axis=1)
    labels = generator.integers(0, classes, n)
    above = (logits > logits[np.arange(n), labels][:, None]).sum(1)
    found = scored(logits.tolist(), labels.tolist(), batch_size)
    assert found["top1"] == pytest.approx(100 * np.mean(above == 0))
    assert found["top5"] == pytest.approx(100 * np.mean(above < 5))


def test_the_model_is_evaluated_in_evaluation_mode_without_gradients():
    model = Answers().train()
    evaluate(model, [(torch.eye(3), torch.arange(3))] * 2)
    assert model.modes == [(False, True)] * 2


def test_an_evaluation_that_is_asked_to_stop_does_so_before_its_next_batch():
    model, asked = Answers(), iter([False, True])
    with pytest.raises(Interrupted, match="stopped in an evaluation"):
        evaluate(model, [(torch.eye(3), torch.arange(3))] * 4, stop=lambda: next(asked))
    assert len(model.modes) == 2


def test_half_precision_logits_are_compared_as_they_are():
    class Half(Answers):
        def forward(self, x):
            return x.bfloat16()

    assert evaluate(Half(), [(torch.eye(6), torch.arange(6))], "bfloat16") == {"top1": 100, "top5": 100}


def test_mixed_precision_casts_the_forward_pass():
    class Product(Answers):
        def forward(self, x):
            self.dtype = (x @ x).dtype
            return x

    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = Product()
        evaluate(model, [(torch.eye(3), torch.arange(3))], precision)
        assert model.dtype == dtype


# --- parameters -------------------------------------------------------------------------------------------


def test_parameters_are_all_counted_fixed_ones_too():
    model = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4))
    assert count_parameters(model) == (3 * 5 + 5) + 2 * 4 * 9 + 2 * 4
    model[0].requires_grad_(False)
    assert count_parameters(model) == (3 * 5 + 5) + 2 * 4 * 9 + 2 * 4


@pytest.mark.parametrize(("size", "millions"), [("tiny", 5.717), ("small", 22.05), ("base", 86.57)])
def test_a_softmax_vit_of_deits_size_has_deits_number_of_parameters(size, millions):
    with torch.device("meta"):
        model = build_vit(STUDY.sizes[size], num_classes=1000)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=0.006)


# --- FLOPs: twice the multiply-adds -----------------------------------------------------------------------


class One(nn.Module):
    """A layer on the whole image, flattened if it is to be."""

    def __init__(self, layer: nn.Module, flatten: bool) -> None:
        super().__init__()
        self.layer, self.flatten = layer, flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1) if self.flatten else x)


def test_the_operations_of_a_known_layer():
    assert count_flops(One(nn.Linear(256, 7), True), SIZE) == 2 * 256 * 7
    assert count_flops(One(nn.Linear(768, 7, bias=False), True), RGB) == 2 * 768 * 7
    # Kernels of 4x4 every 4 pixels over 3x16x16: 16 places, 5 filters.
    assert count_flops(One(nn.Conv2d(3, 5, 4, stride=4), False), RGB) == 2 * 16 * 5 * (3 * 4 * 4)
    # Depthwise 3x3 on 3 channels.
    assert count_flops(One(nn.Conv2d(3, 3, 3, padding=1, groups=3), False), RGB) == 2 * 256 * 3 * 9


def outside_of_mixing(size: Size, tokens: int, classes: int) -> int:
    """Patch embedding, the projections and MLP of every block, head."""
    patches, C = math.prod(size.grid_size), size.dim
    blocks = size.depth * 2 * tokens * (3 * C * C + C * C + 8 * C * C)
    return 2 * patches * C * size.channels * size.patch_size**2 + blocks + 2 * C * classes


@pytest.mark.parametrize("size", [SIZE, changed(RGB, depth=3, heads=4, image_size=32)], ids=["grey", "colour"])
def test_the_operations_of_a_softmax_vit(size):
    """q k^T and the map times v: two products of N x N x C in each block."""
    N = math.prod(size.grid_size) + 1
    expected = outside_of_mixing(size, N, CLASSES) + size.depth * 2 * (2 * N * N * size.dim)
    assert count_flops(build_vit(size, num_classes=CLASSES), size) == expected


@pytest.mark.parametrize("variant", ["elu", "relu"])
def test_the_operations_of_kernel_attention(variant):
    """Per head k^T v, N x d x d, and the product of q with it and the sum of k, N x d x (d + 1)."""
    N, d = math.prod(SIZE.grid_size) + 1, SIZE.dim // SIZE.heads
    expected = outside_of_mixing(SIZE, N, CLASSES) + SIZE.depth * SIZE.heads * 2 * (N * d * d + N * d * (d + 1))
    assert count_flops(build_vit(SIZE, STUDY.variants[variant], num_classes=CLASSES), SIZE) == expected


@pytest.mark.parametrize("variant", STUDY.variants)
def test_operations_grow_with_the_tokens_as_the_operator_promises(variant):
    """Four times the patches: the linear operators' cost grows about four-fold, Softmax's more."""
    small, large = changed(SIZE, image_size=128), changed(SIZE, image_size=256)
    flops = [
        count_flops(build_vit(size, STUDY.variants[variant], num_classes=CLASSES), size) for size in (small, large)
    ]
    growth = flops[1] / flops[0]
    assert (growth > 8) if variant == "softmax" else (3.9 < growth < 4.3)


def test_counting_changes_neither_parameters_nor_gradients():
    model = build_vit(SIZE, num_classes=CLASSES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_flops(model, SIZE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- throughput -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_up", [1e-3, 1e3])
@pytest.mark.parametrize(
    ("seconds", "median"),
    [([1, 5, 2, 4, 3], 3), ([9, 9, 9, 1, 1], 9), ([0.5, 0.5, 0.5, 0.5, 80], 0.5)],
)
def test_throughput_is_that_of_the_median_batch_after_one_to_warm_up(monkeypatch, seconds, median, warm_up):
    durations = [warm_up, *seconds]
    ticks = iter([tick for i, length in enumerate(durations) for tick in (1e4 * i, 1e4 * i + length)])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    model = One(nn.Linear(256, 3), True)
    batches = []
    model.register_forward_hook(lambda module, inputs, output: batches.append(tuple(inputs[0].shape)))
    assert images_per_second(model, SIZE, batch_size=32) == pytest.approx(32 / median)
    assert batches == [(32, 1, 16, 16)] * 6
    assert next(ticks, None) is None


def test_throughput_is_measured_in_evaluation_mode():
    model = Answers().train()
    assert images_per_second(model, SIZE, batch_size=2, repeats=2) > 0
    assert set(model.modes) == {(False, True)}
