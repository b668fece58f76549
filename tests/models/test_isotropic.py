"""What the isotropic model computes: any size, padding that changes nothing, no layout work inside, ablations."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flash_vision.ops.attention import global_product, local_product
from flash_vision.ops.windows import window_layout

SMALL = {"flash_gau_pico": {"depth": 4}, "flash_gau_tiny": {"depth": 4}, "flash_quad_tiny": {"depth": 4}}


def build(name, **kwargs):
    return timm.create_model(name, **{**SMALL.get(name, {"depth": 2}), **kwargs}).eval()


@pytest.mark.parametrize("size", [(224, 224), (231, 333), (512, 512), (1333, 800), (16, 16), (17, 500)])
@pytest.mark.parametrize("name", ["flash_gau_small", "flash_quad_small", "flash_gau_small_paper"])
@torch.no_grad()
def test_takes_any_image_of_at_least_one_patch(name, size):
    out = build(name, num_classes=3)(torch.randn(1, 3, *size))
    assert out.shape == (1, 3)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_another_size_gives_what_a_model_resized_to_it_gives(name):
    model, resized = build(name, img_size=64), build(name, img_size=64)
    resized.load_state_dict(model.state_dict())
    resized.set_input_size((96, 208))
    x = torch.randn(2, 3, 96, 208)
    torch.testing.assert_close(model(x), resized(x))


@pytest.mark.parametrize(
    "overrides", [{}, {"value_conv": True, "position_conv": False}, {"score_fn": "laplace", "global_fn": "plain"}]
)
@pytest.mark.parametrize("name", ["flash_gau_pico", "flash_gau_small_paper"])
@torch.no_grad()
def test_what_lies_in_the_padding_changes_no_output(name, overrides, monkeypatch):
    """13 x 11 tokens: padding in both axes, in every layer filled with other numbers."""
    model = build(name, num_classes=5, patch_size=4, window_size=4, **overrides).double()
    x = torch.randn(2, 3, 52, 44, dtype=torch.float64)
    assert window_layout(13, 11, (4, 4)) == (13, 11, 5, 4)
    expected = model(x)

    def spoil(module, arguments):
        tokens, context, *rest = arguments
        spoilt = tokens.clone()
        spoilt[:, ~context.key_mask] = 50 * torch.randn_like(spoilt[:, ~context.key_mask])
        return spoilt, context, *rest

    for block in model.blocks:
        block.register_forward_pre_hook(spoil)
    torch.testing.assert_close(model(x), expected)


BATCH = 3


class TokenMoves(TorchDispatchMode):
    """Counts the operators that copy or gather tensors at least as large as one layer's tokens."""

    LAYOUT = ("clone", "copy_", "index", "gather", "scatter", "roll", "stack", "constant_pad_nd", "im2col")

    def __init__(self, num_values):
        super().__init__()
        self.num_values = num_values
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_large = isinstance(out, torch.Tensor) and out.numel() >= self.num_values
        # parameters, such as the bias of a large window, have no batch
        if name in self.LAYOUT and is_large and out.shape[0] % BATCH == 0:
            self.found.append(name)
        return out


def token_moves(model, x):
    """Layout operators between the stem and the last block, for tensors of at least (B, N, S)."""
    tokens, context = model.windows(model._embed(x))
    smallest = tokens.shape[0] * tokens.shape[1] * tokens.shape[2] * model.blocks[0].unit.base.out_features
    with TokenMoves(smallest) as moves:
        for block in model.blocks:
            tokens = block(tokens, context)
    return moves.found


@pytest.mark.parametrize("name", ["flash_gau_small", "flash_quad_small", "flash_gau_base"])
@pytest.mark.parametrize("train", [False, True])
def test_no_token_is_moved_between_stem_and_last_block(name, train):
    model = build(name, num_classes=0).train(train)
    assert token_moves(model, torch.randn(BATCH, 3, 224, 224)) == []


@torch.no_grad()
def test_value_convolution_copies_tokens_once_a_layer():
    """Into raster order, (B, N, E); the way back is part of the sum with the branches."""
    model = build("flash_gau_small", num_classes=0, value_conv=True)
    assert token_moves(model, torch.randn(BATCH, 3, 224, 224)) == ["clone"] * len(model.blocks)


ABLATIONS = {
    "no gate": {"gate": False},
    "local only": {"branches": "local"},
    "global only": {"branches": "global"},
    "two heads": {"num_heads": 2},
    "softmax": {"score_fn": "softmax"},
    "laplace": {"score_fn": "laplace"},
    "divisor inside": {"divisor": "inside"},
    "plain global": {"global_fn": "plain"},
    "no convolution": {"value_conv": False},
    "no convolution after the stem": {"position_conv": False},
    "rotary": {"rope_temperature": 100.0},
    "sincos": {"pos_embed": "sincos"},
    "no position": {"pos_embed": "none", "rel_pos_bias": False},
    "layer scale": {"init_values": 1e-5},
    "large start": {"weight_init": "reset"},
    "no token mixing": {"unit": "glu", "value_conv": False},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_trains_a_step_in_low_precision(ablation, dtype):
    model = build("flash_gau_pico", depth=2, num_classes=4, **ABLATIONS[ablation]).train()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(2, 3, 28, 36)).float().square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_changes_the_output(ablation):
    torch.manual_seed(1)
    base = build("flash_gau_pico", depth=2, num_classes=4, drop_path_rate=0.1)
    torch.manual_seed(1)
    other = build("flash_gau_pico", depth=2, num_classes=4, **ABLATIONS[ablation])
    x = torch.randn(2, 3, 32, 32)
    assert (base(x) - other(x)).abs().max() > 1e-6


def test_one_window_of_local_attention_is_the_quadratic_model():
    how = {"depth": 2, "num_classes": 5, "window_size": 8, "qk_dim": 32, "value_conv": False}
    mixed = build("flash_gau_pico", branches="local", **how)
    quad = build(
        "flash_quad_tiny",
        img_size=32,
        patch_size=4,
        embed_dim=128,
        depth=2,
        num_classes=5,
        window_size=8,
        score_fn="relu2",
    )
    quad.load_state_dict(mixed.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(mixed(x), quad(x))


def test_default_init_is_fan_in_scaling_with_the_units_output_at_a_tenth():
    for name, module in build("flash_gau_tiny").named_modules():
        if isinstance(module, torch.nn.Linear) and name != "head":
            gain = 0.1 if name.endswith("unit.proj") else 1.0
            # a normal distribution cut at 3 deviations has .987 of its deviation
            expected = 0.987 * gain * module.in_features**-0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("name", ["flash_gau_tiny", "flash_gau_base", "flash_gau_small_paper"])
@torch.no_grad()
def test_branches_start_balanced_under_our_init_and_unbalanced_under_the_published_one(name):
    ratios = []

    def compare(unit, arguments):
        x, context = arguments
        weights, queries, keys = unit.factors(unit.base(x), unit.factor_parameters(), context)
        v = F.silu(unit.value(x)).unsqueeze(1)
        between = global_product(queries, keys, v.flatten(2, 3))
        ratios.append((local_product(weights, v).abs().mean() / between.abs().mean()).item())

    model = build(name)
    for block in model.blocks:
        block.unit.register_forward_pre_hook(compare)
    model(torch.randn(2, 3, 224, 224))
    if name == "flash_gau_small_paper":
        assert all(r > 20 or r < 1 / 20 for r in ratios), ratios
    else:
        assert all(0.2 < r < 5 for r in ratios), ratios


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_pool": "token"}, ["global_pool", "'token'"]),
        ({"unit": "conv"}, ["unit", "'conv'"]),
        ({"pos_embed": "rope"}, ["pos_embed", "'rope'"]),
        ({"window_size": 0}, ["window_size", "at least 1", "0"]),
        ({"patch_size": 0}, ["patch_size", "at least 1", "0"]),
        ({"qk_dim": 0}, ["qk_dim", "at least 1", "0"]),
        ({"depth": 0}, ["depth", "at least 1", "0"]),
        ({"img_size": 3}, ["img_size", "at least one patch", "3"]),
        ({"score_fn": "relu"}, ["score_fn", "'relu'"]),
        ({"rope_temperature": 100.0, "qk_dim": 6}, ["qk_dim", "multiple of 4", "6"]),
        ({"pos_embed": "sincos", "embed_dim": 126}, ["embed_dim", "multiple of 4", "126"]),
        ({"drop_path_rate": 1.0}, ["drop_path_rate", "below 1", "1.0"]),
        ({"weight_init": "jax"}, ["weight_init", "'jax'"]),
        ({"unit": "quadratic", "global_fn": "plain"}, ["global_fn", "quadratic", "plain"]),
        ({"unit": "glu", "score_fn": "laplace"}, ["score_fn", "glu", "laplace"]),
    ],
)
def test_bad_arguments_are_named_with_constraint_and_value(arguments, words):
    with pytest.raises(ValueError) as error:
        timm.create_model("flash_gau_pico", **arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("argument", ["hidden_size", "output_stride", "class_token"])
def test_unknown_keywords_raise(argument):
    with pytest.raises(TypeError, match=argument):
        timm.create_model("flash_gau_pico", **{argument: 1})


def test_an_image_smaller_than_one_patch_is_refused():
    with pytest.raises(ValueError, match=r"at least one patch of \(16, 16\) pixels, got 15 x 40"):
        build("flash_gau_tiny")(torch.randn(1, 3, 15, 40))
