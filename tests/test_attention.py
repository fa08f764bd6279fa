"""The operators against recorded numbers, against slow references, and against what each promises."""

import math
import re
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from linvit.attention import Attention, GeometryError
from linvit.attention.mhla import MhlaAttention, mixing_matrix

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
FILES = ("softmax", "elu", "relu", "inline", "inline_local", "mhla_linear", "mhla_cos", "mhla_exp", "mhla_local", "ttt")
LINEAR = tuple(name for name in models.OPERATORS if name != "softmax")
WITH_MAP = ("softmax", "elu", "relu", "inline")
ON_A_GRID = ("mhla", "ttt")
RECORDED = {"input", "cotangent", "output", "input_grad"}


def exact(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- recorded numbers --------------------------------------------------------------------------------------


def golden(name: str) -> tuple[torch.nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """The operator that a file describes, with its own start; the file's weights; what it recorded."""
    path = GOLDEN / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        settings = file.metadata()
    tensors = load_file(path)
    recorded = {key: tensors.pop(key) for key in RECORDED}
    _, N, C = recorded["input"].shape
    cls, _, prefix = models.OPERATORS[name.split("_")[0]]
    prefix = int(settings.get("num_prefix_tokens", prefix))
    # Files without a grid are of operators that know no order of the tokens: any grid of that many will do.
    grid = tuple(map(int, re.match(r"(\d+)x(\d+)", settings.get("grid", f"1x{N - prefix}")).groups()))
    own = {"local_residual": True} if name == "inline_local" else {}
    if "transform" in settings:
        own |= {"mixing": settings["transform"], "window": int(settings["window"].split("x")[0])}
    return cls(C, int(settings["num_heads"]), grid_size=grid, num_prefix_tokens=prefix, **own), tensors, recorded


def test_every_golden_file_is_checked():
    assert {path.stem for path in GOLDEN.glob("*.safetensors")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_output_and_input_gradient_are_the_recorded_ones(name):
    operator, weights, recorded = golden(name)
    operator.load_state_dict(weights, strict=True)
    x = recorded["input"].requires_grad_()
    output = operator(x)
    (gradient,) = torch.autograd.grad(output, x, recorded["cotangent"])
    for ours, reference in ((output, recorded["output"]), (gradient, recorded["input_grad"])):
        assert (ours - reference).abs().max() <= 3e-6 * reference.abs().max()


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("mhla")])
def test_mhla_mixing_starts_as_recorded(name):
    operator, weights, _ = golden(name)
    torch.testing.assert_close(operator.block_mix.weight.data, weights["block_mix.weight"], rtol=1e-6, atol=1e-7)


# --- slow references, in float64 ---------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "prefix"), [((2, 3), 1), ((4, 2), 0), ((1, 5), 3)])
@pytest.mark.parametrize("name", WITH_MAP)
def test_forward_is_the_quadratic_map_times_the_values(name, grid, prefix):
    operator = models.operator(name, grid, dim=12, heads=3, num_prefix_tokens=prefix)
    x = torch.randn(2, prefix + math.prod(grid), 12, dtype=torch.float64)
    q, k, v = models.split_heads(operator.qkv(x), 3)
    reference = models.quadratic_map(name, q, k)
    exact(operator(x), operator.proj((reference @ v).transpose(1, 2).reshape(x.shape)))
    # timm's Softmax and our map of it go through float32.
    exact(operator.attention_map(x).double(), reference, 1e-6 if name == "softmax" else 1e-12)
    nothing = (q <= 0).all(-1) if name == "relu" else torch.zeros_like(q[..., 0], dtype=torch.bool)
    exact(reference.sum(-1), (~nothing).double(), 1e-4)
    assert (reference < 0).any() == (name == "inline"), "only the subtraction-normalised map is signed"


def local_residual(operator: torch.nn.Module, x: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
    """InLine's residual on the patch values [B, h w, C], cell by cell."""
    (h, w), C, H = grid, x.shape[-1], operator.num_heads
    values = v[:, operator.num_prefix_tokens :]
    out = torch.zeros_like(values)
    for image in range(len(x)):
        mean = x[image].mean(0).reshape(H, -1)  # groups of channels, one a head
        w1, w2 = (layer.weight[..., 0].reshape(H, -1, C // H) for layer in (operator.local.fc1, operator.local.fc2))
        hidden = F.gelu(torch.einsum("hoi,hi->ho", w1, mean).flatten() + operator.local.fc1.bias)
        kernel = torch.einsum("hoi,hi->ho", w2, hidden.reshape(H, -1)).flatten() + operator.local.fc2.bias
        kernel = kernel.reshape(C, 3, 3)
        for r, c in ((r, c) for r in range(h) for c in range(w)):
            for dr, dc in ((dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1)):
                if 0 <= r + dr < h and 0 <= c + dc < w:
                    out[image, r * w + c] += kernel[:, dr + 1, dc + 1] * values[image, (r + dr) * w + c + dc]
    return out


@pytest.mark.parametrize("grid", [(2, 3), (4, 2)])
def test_inline_local_residual_is_a_predicted_kernel_on_the_patch_values(grid):
    operator = models.operator("inline_local", grid)
    plain = models.operator("inline", grid)
    plain.load_state_dict(operator.state_dict(), strict=False)
    x = models.tokens(operator, grid)
    v = operator.qkv(x).chunk(3, dim=-1)[2]
    residual = local_residual(operator, x, v, grid) @ operator.proj.weight.T
    # Locality: the class token gets none of it.
    exact(operator(x), plain(x) + F.pad(residual, (0, 0, 1, 0)))
    assert torch.equal(operator(x)[:, :1], plain(x)[:, :1])


def inner_step(model, weights: list[Tensor], targets: Tensor, column: tuple[int, ...]) -> list[Tensor]:
    """One step of learning rate 1 on the inner loss -c <model(weights), targets>; its gradient by autograd."""
    weights = [weight.detach().clone().requires_grad_() for weight in weights]
    loss = -(9**-0.5) * (model(*weights) * targets).sum()
    gradients = torch.autograd.grad(loss, weights)
    norms = [gradient.square().sum(column, keepdim=True).sqrt() for gradient in gradients]
    return [w.detach() - g / (norm + 1) for w, g, norm in zip(weights, gradients, norms, strict=True)]


@torch.enable_grad()
def ttt_reference(operator: torch.nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
    (h, w), d, H = grid, operator.head_dim, operator.num_heads
    outputs = []
    for image in operator.qkv(x).detach():
        swiglu, conv = image[:, : 3 * H * d], image[:, 3 * H * d :]
        branches = []
        qs, ks, vs = models.split_heads(swiglu[None], H)
        for head in range(H):

            def network(w1, w2, inputs=ks[0, head]):
                return (inputs @ w1) * F.silu(inputs @ w2)

            step = inner_step(network, [operator.w1[0, head], operator.w2[0, head]], vs[0, head] / (h * w), (0,))
            branches.append(network(*step, inputs=qs[0, head]))
        q, k, v = (part.T.reshape(1, d, h, w) for part in conv.chunk(3, dim=-1))

        def filters(w3, inputs=k):
            return F.conv2d(inputs, w3, padding=1, groups=d)

        (step,) = inner_step(filters, [operator.w3], v / (h * w), (1, 2, 3))
        branches.append(filters(step, inputs=q)[0].flatten(1).T)
        outputs.append(torch.cat(branches, dim=-1))
    return operator.proj(torch.stack(outputs))


@pytest.mark.parametrize("grid", [(2, 3), (4, 2), (1, 4)])
def test_ttt_takes_one_gradient_step_on_its_inner_losses(grid):
    operator = models.operator("ttt", grid, dim=12, heads=3)
    x = models.tokens(operator, grid)
    exact(operator(x), ttt_reference(operator, x, grid))


def mhla_reference(operator: torch.nn.Module, x: Tensor, grid: tuple[int, int], e: int, norms: bool) -> Tensor:
    """Window by window and position by position."""
    (h, w), C, H = grid, x.shape[-1], operator.num_heads
    tokens = [
        [(r * e + i) * w + c * e + j for i in range(e) for j in range(e)] for r in range(h // e) for c in range(w // e)
    ]
    M = operator.block_mix.weight
    if norms:
        x = F.layer_norm(x, (C,), operator.norm.weight, operator.norm.bias, eps=1e-5)
    q, k, v = operator.qkv(x).chunk(3, dim=-1)
    if norms:  # over all channels, before they are split into heads
        tiny = torch.finfo(x.dtype).eps
        q = q / (q.square().mean(-1, keepdim=True) + tiny).sqrt() * operator.q_norm.weight
        k = k / (k.square().mean(-1, keepdim=True) + tiny).sqrt() * operator.k_norm.weight
    q, k = q.clamp(min=0) + 1e-6, k.clamp(min=0) + 1e-6
    out = torch.zeros_like(x)
    for image, head in ((b, i) for b in range(len(x)) for i in range(H)):
        own = slice(head * C // H, (head + 1) * C // H)
        qh, kh, vh = (t[image, :, own] for t in (q, k, v))
        kv = [kh[window].T @ vh[window] for window in tokens]
        z = [kh[window].sum(0) for window in tokens]
        for i, window in enumerate(tokens):
            mixed = sum(M[i, j] * kv[j] for j in range(len(tokens)))
            for t, token in enumerate(window):
                normaliser = sum(M[i, j] * (qh[tokens[j][t]] @ z[j]) for j in range(len(tokens))) + 1e-6
                out[image, token, own] = qh[token] @ mixed / normaliser
    for r, c in ((r, c) for r in range(h) for c in range(w)):
        out[:, r * w + c] += operator.lepe.bias
        for dr, dc in ((dr, dc) for dr in range(-2, 3) for dc in range(-2, 3)):
            if 0 <= r + dr < h and 0 <= c + dc < w:
                out[:, r * w + c] += operator.lepe.weight[:, 0, dr + 2, dc + 2] * v[:, (r + dr) * w + c + dc]
    return operator.proj(out)


@pytest.mark.parametrize(
    ("grid", "window", "norms"),
    [((2, 4), 2, True), ((4, 2), 2, False), ((2, 3), 1, True), ((4, 6), 2, True), ((3, 3), 3, True)],
)
def test_mhla_mixes_window_summaries(grid, window, norms):
    operator = models.operator("mhla", grid, window=window, norms=norms)
    x = models.tokens(operator, grid)
    exact(operator(x), mhla_reference(operator, x, grid, window, norms))
    assert norms or not {"norm", "q_norm", "k_norm"} & {name.split(".")[0] for name, _ in operator.named_parameters()}


@pytest.mark.parametrize("mixing", ["linear", "cos", "exp", "local"])
@pytest.mark.parametrize("windows", [(1, 1), (1, 4), (3, 2)])
def test_mhla_mixing_follows_the_distance_of_windows(windows, mixing):
    rows, columns = windows
    centres = [(r, c) for r in range(rows) for c in range(columns)]
    distances = [[math.dist(a, b) for b in centres] for a in centres]
    furthest = max(map(max, distances)) or 1
    start = {
        "linear": lambda D: 1 - D / furthest,
        "cos": lambda D: math.cos(math.pi / 4 * D / furthest),
        "exp": lambda D: math.exp(-D / 3),
        "local": lambda D: float(D <= 1.5),
    }[mixing]
    expected = torch.tensor([[start(D) for D in row] for row in distances])
    # A column, not a row, sums to one: the two differ on a grid of 3 x 2 windows.
    torch.testing.assert_close(mixing_matrix(windows, mixing), expected / expected.sum(0), rtol=1e-5, atol=1e-6)


def test_mhla_takes_half_the_shorter_side_as_its_window_and_the_linear_mixing():
    paper = MhlaAttention(8, 2, grid_size=(14, 14), num_prefix_tokens=0)
    assert paper.window == 7
    assert torch.equal(paper.block_mix.weight.data, mixing_matrix((2, 2), "linear"))
    with pytest.raises(ValueError, match=r"'sine'.*linear, cos, exp, local"):
        MhlaAttention(8, 2, grid_size=(4, 4), num_prefix_tokens=0, mixing="sine")


@pytest.mark.parametrize("name", models.OPERATORS)
def test_gradients_of_input_and_parameters_agree_with_finite_differences(name):
    grid = (2, 4)
    operator = models.operator(name, grid, dim=4)
    names, parameters = zip(*operator.named_parameters(), strict=True)

    def forward(x, *values):
        return torch.func.functional_call(operator, dict(zip(names, values, strict=True)), (x,))

    x = models.tokens(operator, grid, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(forward, (x, *parameters))


# --- what each promises ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WITH_MAP, "inline_local", *ON_A_GRID])
def test_only_operators_on_a_grid_know_the_order_of_tokens(name):
    operator = models.operator(name, (2, 4))
    x = models.tokens(operator, (2, 4))
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    difference = (operator(x[:, order]) - operator(x)[:, order]).abs().max()
    assert difference < 1e-12 if name in WITH_MAP else difference > 1e-3


@pytest.mark.parametrize("name", models.OPERATORS)
def test_an_image_is_mixed_by_itself_and_nothing_is_kept(name):
    operator = models.operator(name)
    x = models.tokens(operator, (2, 4), batch=3)
    before = {key: tensor.clone() for key, tensor in operator.state_dict().items()}
    together = operator(x)
    exact(together, torch.cat([operator(image[None]) for image in x]))
    # ttt's inner step is taken anew for each image, at inference as in training, and leaves the weights alone.
    with torch.inference_mode():
        exact(operator.eval()(x), together, 1e-14)
    assert all(torch.equal(tensor, before[key]) for key, tensor in operator.state_dict().items())


@pytest.mark.parametrize("name", LINEAR)
def test_masks_are_refused(name):
    operator = models.operator(name)
    x = models.tokens(operator, (2, 4))
    for refused in ({"attn_mask": torch.ones(x.shape[1], x.shape[1])}, {"is_causal": True}):
        with pytest.raises(ValueError, match="attn_mask and is_causal are not supported"):
            operator(x, **refused)
    exact(operator(x, attn_mask=None, is_causal=False), operator(x), 0)  # as timm's block calls it


@pytest.mark.parametrize("change", [-1, 1, 8])
@pytest.mark.parametrize("name", ["inline_local", *ON_A_GRID])
def test_a_wrong_number_of_tokens_is_refused(name, change):
    operator = models.operator(name, (2, 4))
    prefix = operator.num_prefix_tokens
    N = prefix + 8 + change
    expected = f"{type(operator).__name__} got {N} tokens, expected {prefix + 8}: {prefix} prefix and a 2x4 grid"
    with pytest.raises(GeometryError, match=re.escape(expected)):
        operator(torch.zeros(1, N, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mhla", {"num_prefix_tokens": 1}, "patch tokens only, got num_prefix_tokens=1; .*class_token=False"),
        ("ttt", {"num_prefix_tokens": 5}, "patch tokens only, got num_prefix_tokens=5; .*class_token=False"),
        ("mhla", {"grid": (4, 6), "window": 4}, "windows of 4 tokens do not tile a 4x6 grid"),
        ("mhla", {"grid": (2, 4), "window": 4}, "windows of 4 tokens do not tile a 2x4 grid"),
        ("mhla", {"grid": (4, 4), "window": 0}, "windows of 0 tokens do not tile a 4x4 grid"),
        ("mhla", {"grid": (4, 4), "window": -2}, "windows of -2 tokens do not tile a 4x4 grid"),
        ("mhla", {"grid": (7, 7), "window": None}, "windows of 3 tokens do not tile a 7x7 grid"),
        ("relu", {"dim": 8, "heads": 3}, "dim 8 is not a multiple of num_heads 3"),
    ],
)
def test_geometry_that_does_not_fit_is_refused(name, options, words):
    with pytest.raises(GeometryError, match=words):
        models.operator(name, **options)


@pytest.mark.parametrize("name", models.OPERATORS)
def test_qkv_bias_can_be_left_out(name):
    operator = models.operator(name, qkv_bias=False)
    assert operator.qkv.bias is None
    assert "qkv.bias" not in operator.softmax_view()
    assert operator(models.tokens(operator, (2, 4))).isfinite().all()


def test_what_softmax_has_too_is_the_view_that_copies_write_into():
    for name in models.OPERATORS:
        operator = models.operator(name)
        view = operator.softmax_view()
        parameters = dict(operator.named_parameters())
        assert view.keys() == {"qkv.weight", "qkv.bias"} | ({"proj.weight", "proj.bias"} if name != "ttt" else set())
        assert [tuple(view[key].shape) for key in ("qkv.weight", "qkv.bias")] == [(24, 8), (24,)]
        assert all(tensor.data_ptr() == parameters[key].data_ptr() for key, tensor in view.items()), "not a view"


# --- half precision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.4], ids=["start", "large"])
@pytest.mark.parametrize("name", models.OPERATORS)
def test_bfloat16_autocast_stays_finite_and_close(name, scale):
    operator = models.operator(name, (4, 4), dim=32, scale=scale).float()
    x = (30 * models.tokens(operator, (4, 4))).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        half = operator(x)
    half.float().square().sum().backward()
    for tensor in (half, x.grad, *(parameter.grad for parameter in operator.parameters())):
        assert tensor.isfinite().all()
    if scale is None:  # far from the start softmax becomes an argmax, which half precision may decide otherwise
        full = operator(x)
        assert (half.float() - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("name", ["elu", "relu", "inline", "mhla", "ttt"])
def test_sums_over_tokens_are_taken_in_float32_under_autocast(name):
    operator = models.operator(name, (4, 4), dim=32).float()
    if name == "mhla":  # its convolution may be in half precision: there is nothing to divide
        torch.nn.init.zeros_(operator.lepe.weight)
        torch.nn.init.zeros_(operator.lepe.bias)
    mixed: list[Tensor] = []
    operator.proj.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    x = 30 * models.tokens(operator, (4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        operator(x)

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module.forward(inputs[0]).float()

    # The same with float32 everywhere but in this one product.
    operator.qkv.register_forward_hook(rounded)
    operator(x)
    assert (mixed[0] - mixed[1]).norm() < 1e-5 * mixed[1].norm()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_relu_gives_nothing_rather_than_nan_to_a_query_without_positive_entries(precision):
    operator = models.operator("relu").float()
    with torch.no_grad():
        operator.qkv.weight[:8] = 0
        operator.qkv.bias[:8] = -1
    x = models.tokens(operator, (2, 4)).requires_grad_()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        output = operator(x)
    output.float().sum().backward()
    exact(output.float(), operator.proj.bias.to(precision).float().expand_as(output), 1e-3)
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in operator.parameters())


@pytest.mark.parametrize("name", models.OPERATORS)
def test_tokens_of_zeros_have_finite_gradients(name):
    # Every norm, sum and division meets its zero: at their start the projections have no bias.
    operator = models.operator(name, scale=None).float()
    x = torch.zeros_like(models.tokens(operator, (2, 4))).requires_grad_()
    output = operator(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *operator.parameters()))


@pytest.mark.parametrize("name", models.OPERATORS)
def test_a_model_in_bfloat16_is_close_to_the_same_in_float32(name):
    operator = models.operator(name, (4, 4), dim=32, scale=None).bfloat16()
    x = models.tokens(operator, (4, 4)).requires_grad_()
    half = operator(x)
    assert half.dtype == torch.bfloat16
    half.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in (x, *operator.parameters()))
    full = operator.float()(x.float())
    assert (half.float() - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", models.OPERATORS)
def test_forward_and_backward_compile_to_one_graph(name, precision):
    operator = models.operator(name).float()
    x = models.tokens(operator, (2, 4)).requires_grad_()
    torch._dynamo.reset()
    results = []
    for call in (operator, torch.compile(operator, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            output = call(x)
        gradients = torch.autograd.grad(output.float().square().sum(), (x, *operator.parameters()))
        results.append([output, *gradients])
    for eager, compiled in zip(*results, strict=True):
        assert (compiled - eager).float().norm() <= (
            1e-5 if precision == torch.float32 else 0.02
        ) * eager.float().norm()


def test_an_operator_needs_no_more_than_mix():
    class Mean(Attention):
        def mix(self, q, k, v):
            return v.mean(-2, keepdim=True).expand_as(v)

    operator = Mean(8, 2, grid_size=(2, 3), num_prefix_tokens=1)
    x = torch.randn(2, 7, 8)
    expected = operator.proj(operator.qkv(x)[..., 16:].mean(1, keepdim=True)).expand(2, 7, 8)
    torch.testing.assert_close(operator(x), expected)
