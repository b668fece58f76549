"""The gated units: their formulas spelt out, their identities, their bad input."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from flash_vision.layers import (
    GatedAttentionUnit,
    GatedBlock,
    GatedLinearUnit,
    MixedChunkUnit,
    ScaleOffset,
    TokenWindows,
)
from flash_vision.ops import linear_attention, quadratic_attention, reference
from flash_vision.ops.windows import merge_windows, partition_windows

DIM = 12
# with windows of 3 x 3: one padded window, one whole window, several, several padded ones
SIZES = [(1, 1), (3, 4), (6, 3), (7, 5)]


def tokens_of(height, width, *, window=(3, 3), one_window=False, rotary_dim=0):
    windows = TokenWindows((height, width), window, one_window=one_window, rotary_dim=rotary_dim)
    return windows(torch.randn(2, height, width, DIM, dtype=torch.float64))


def randomised(unit):
    """Leave no parameter at a value that would hide a mistake (zeros, ones)."""
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return unit.double()


def roles_of(unit, x):
    base = F.silu(unit.base(x))
    return [base * g + b for g, b in zip(unit.scale_offset.gamma, unit.scale_offset.beta, strict=True)]


@pytest.mark.parametrize("global_fn", ["plain", "inline"])
@pytest.mark.parametrize(("score_fn", "divisor"), [("relu2", "inside"), ("relu2", "outside"), ("laplace", "outside")])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_mixed_chunk_unit_is_its_formula(height, width, score_fn, divisor, global_fn):
    x, context = tokens_of(height, width)
    how = {"score_fn": score_fn, "divisor": divisor, "global_fn": global_fn}
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3), **how))
    bias = unit.position_bias(context.relative_index)[0, 0]
    value = F.silu(unit.value(x))
    mixed = reference.mixed_chunk_attention(*roles_of(unit, x), value, bias, context.key_mask, **how)
    expected = (mixed * F.silu(unit.gate(x))) @ unit.proj.weight.mT
    out = unit(x, context)
    real = slice(None) if context.key_mask is None else context.key_mask
    torch.testing.assert_close(out[:, real], expected[:, real])
    leaves = list(unit.parameters())
    weight = torch.randn_like(out[:, real])
    fast = torch.autograd.grad(out[:, real], leaves, weight)
    slow = torch.autograd.grad(expected[:, real], leaves, weight)
    for (name, _), a, b in zip(unit.named_parameters(), fast, slow, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def test_gated_attention_unit_is_its_formula():
    x, context = tokens_of(5, 4, one_window=True)
    unit = randomised(GatedAttentionUnit(DIM, qk_dim=8, score_fn="softmax"))
    q, k = roles_of(unit, x)
    mixed = torch.softmax(q @ k.mT / 8**0.5, -1) @ F.silu(unit.value(x))
    torch.testing.assert_close(unit(x, context), unit.proj(mixed * F.silu(unit.gate(x))))


def test_one_window_makes_the_local_branch_full_attention():
    x, context = tokens_of(4, 3, window=(4, 3))
    whole = randomised(GatedAttentionUnit(DIM, qk_dim=8, bias_window=(4, 3)))
    local = MixedChunkUnit(DIM, qk_dim=8, bias_window=(4, 3), branches="local").double()
    local.load_state_dict(whole.state_dict())
    torch.testing.assert_close(local(x, context), whole(x, context))


def test_permuting_whole_windows_permutes_the_output():
    x, context = tokens_of(6, 9)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3)))
    order = torch.randperm(x.shape[1])
    torch.testing.assert_close(unit(x[:, order], context), unit(x, context)[:, order])


def test_local_branch_stays_in_its_window_and_global_branch_reaches_all():
    x, context = tokens_of(6, 6)
    changed = x.clone()
    changed[:, 0] += 1.0
    for branches, reaches in (("local", False), ("global", True), ("both", True)):
        unit = randomised(MixedChunkUnit(DIM, qk_dim=8, branches=branches))
        other_windows = (unit(changed, context) - unit(x, context))[:, 1:].abs().max()
        assert (other_windows > 1e-6) == reaches, branches


@pytest.mark.parametrize("value_conv", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_padding_changes_no_real_token(value_conv, num_heads):
    x, context = tokens_of(7, 5, rotary_dim=8 // num_heads)
    assert context.key_mask is not None
    how = {"global_fn": "inline", "bias_window": (3, 3), "num_heads": num_heads}
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, value_conv=value_conv, **how))
    before = unit(x, context)[:, context.key_mask]
    x[:, ~context.key_mask] = 100.0
    torch.testing.assert_close(unit(x, context)[:, context.key_mask], before)


def test_heads_split_the_channels_into_independent_units():
    """Zeroing one head's gate leaves exactly the other head."""
    x, context = tokens_of(6, 6)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, num_heads=2, gate=False, global_fn="inline"))
    value = F.silu(unit.value(x))
    outputs = []
    for head in range(2):
        q, k = slice(4 * head, 4 * head + 4), slice(DIM * head, DIM * head + DIM)
        roles = [role[..., q] for role in roles_of(unit, x)]
        how = {"score_fn": "relu2", "divisor": "outside", "global_fn": "inline"}
        outputs.append(reference.mixed_chunk_attention(*roles, value[..., k], **how))
    torch.testing.assert_close(unit(x, context), unit.proj(torch.cat(outputs, -1)))


def test_value_convolution_is_a_depthwise_convolution_of_the_raster_image():
    x, context = tokens_of(7, 5)
    plain = randomised(GatedAttentionUnit(DIM, qk_dim=8))
    conv = GatedAttentionUnit(DIM, qk_dim=8, value_conv=True).double()
    conv.load_state_dict(plain.state_dict(), strict=False)
    image = merge_windows(F.silu(conv.value(x)), context.layout).permute(0, 3, 1, 2)
    term = partition_windows(conv.value_conv(image).permute(0, 2, 3, 1), context.layout)
    expected = plain(x, context) + (term * F.silu(conv.gate(x))) @ conv.proj.weight.mT
    torch.testing.assert_close(conv(x, context), expected)


def test_both_branches_are_the_sum_of_each_alone():
    x, context = tokens_of(6, 6)
    how = {"qk_dim": 8, "gate": False, "global_fn": "inline", "bias_window": (3, 3)}
    both = randomised(MixedChunkUnit(DIM, **how))
    total = 0
    for branches, roles in (("local", slice(0, 2)), ("global", slice(2, 4))):
        one = MixedChunkUnit(DIM, branches=branches, **how).double()
        state = {k: v[roles] if k.startswith("scale_offset") else v for k, v in both.state_dict().items()}
        one.load_state_dict({k: v for k, v in state.items() if k in one.state_dict()})
        total = total + one(x, context)
    torch.testing.assert_close(both(x, context), total)


@pytest.mark.parametrize("training", [True, False])
def test_one_window_takes_one_product_with_the_values(training):
    x, context = tokens_of(4, 3, window=(4, 3))
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, global_fn="inline"))
    tokens, hidden = x.shape[0] * 12, 2 * DIM
    with torch.set_grad_enabled(training), FlopCounterMode(display=False) as counter:
        unit(x, context)
    assert counter.get_total_flops() / 2 / tokens == 3 * DIM * hidden + DIM * 8 + 12 * (8 + 8 + hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", ["inside", "outside"])
def test_one_window_loses_no_more_in_low_precision_than_the_branches_apart(divisor, dtype):
    x, context = tokens_of(7, 7, window=(7, 7))
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, divisor=divisor, bias_window=(7, 7), global_fn="inline"))
    exact, value = unit.mix(unit.base(x), unit.value(x), context), unit.value(x).to(dtype)
    q, k, q_global, k_global = (role.to(dtype) for role in roles_of(unit, x))
    bias = unit.position_bias(context.relative_index).to(dtype)
    apart = quadratic_attention(q, k, value, bias[0], score_fn="relu2", divisor=divisor)
    apart = apart + linear_attention(q_global, k_global, value, global_fn="inline")
    together = unit.to(dtype).mix(unit.base(x.to(dtype)), value, context)
    assert together.dtype == dtype
    assert (together - exact).norm() <= 2 * (apart - exact).norm()


UNITS = {
    "mixed": (MixedChunkUnit, {"global_fn": "inline"}),
    "mixed, plain": (MixedChunkUnit, {"global_fn": "plain", "divisor": "inside"}),
    "mixed, laplace": (MixedChunkUnit, {"score_fn": "laplace"}),
    "mixed, softmax": (MixedChunkUnit, {"score_fn": "softmax"}),
    "local only": (MixedChunkUnit, {"branches": "local"}),
    "global only": (MixedChunkUnit, {"branches": "global", "global_fn": "inline"}),
    "quadratic": (GatedAttentionUnit, {}),
    "mixed, convolution": (MixedChunkUnit, {"value_conv": True}),
    "quadratic, convolution": (GatedAttentionUnit, {"value_conv": True}),
}


@pytest.mark.parametrize("rotary_dim", [0, 8])
@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("kind", UNITS)
def test_recomputing_path_equals_autograd_in_values_and_all_gradients(kind, height, width, rotary_dim):
    x, context = tokens_of(height, width, rotary_dim=rotary_dim)
    x.requires_grad_()
    cls, how = UNITS[kind]
    unit = randomised(cls(DIM, qk_dim=8, bias_window=(3, 3), **how))
    results = []
    for recomputes in (True, False):
        assert unit.recomputes or not recomputes
        unit.recomputes = recomputes
        out = unit(x, context)
        torch.manual_seed(3)
        real = out if context.key_mask is None else out[:, context.key_mask]
        results.append([out, *torch.autograd.grad(real, [x, *unit.parameters()], torch.randn_like(real))])
    with torch.no_grad():
        results.append([unit(x, context)])
    for name, a, b in zip(["out", "x", *dict(unit.named_parameters())], *results[:2], strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(results[2][0], results[0][0])


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("kind", UNITS)
def test_every_form_of_a_block_equals_autograd_in_values_and_all_gradients(kind, height, width, monkeypatch):
    x, context = tokens_of(height, width)
    x.requires_grad_()
    cls, how = UNITS[kind]
    block = GatedBlock(DIM, randomised(cls(DIM, qk_dim=8, bias_window=(3, 3), **how)), init_values=0.5).double()
    randomised(block.norm)
    block.double()
    results = []
    for form in ("recomputed", "checkpoint", "compiled", "autograd", "torch's checkpoint"):
        block.unit.recomputes = form in ("recomputed", "checkpoint", "compiled")
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda form=form: form == "compiled")
        out = block(x, context, "checkpoint" in form)
        torch.manual_seed(3)
        real = out if context.key_mask is None else out[:, context.key_mask]
        results.append([out, *torch.autograd.grad(real, [x, *block.parameters()], torch.randn_like(real))])
    for name, expected, *found in zip(["out", "x", *dict(block.named_parameters())], *results[::-1], strict=True):
        for a in found:
            torch.testing.assert_close(a, expected, msg=lambda m, name=name: f"{name}: {m}")


def test_block_trains_what_is_not_frozen_and_nothing_else():
    x, context = tokens_of(6, 6)
    block = GatedBlock(DIM, randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3)))).double()
    whole = torch.autograd.grad(block(x, context).square().sum(), list(block.parameters()))
    for chosen, (name, _) in zip(whole, block.named_parameters(), strict=True):
        for other, parameter in block.named_parameters():
            parameter.requires_grad_(other == name)
            parameter.grad = None
        block(x, context).square().sum().backward()
        found = {other: p.grad for other, p in block.named_parameters() if p.grad is not None}
        assert list(found) == [name]
        torch.testing.assert_close(found[name], chosen)


def kept_for_backward(unit, *arguments):
    """Numbers that autograd keeps between forward and backward, each storage once, parameters left out."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        unit(*arguments)
    parameters = {p.untyped_storage().data_ptr() for p in unit.parameters()}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


@pytest.mark.parametrize("value_conv", [False, True])
@pytest.mark.parametrize("cls", [MixedChunkUnit, GatedAttentionUnit])
def test_training_keeps_no_more_than_the_input_the_pre_activations_and_the_mixed_values(cls, value_conv):
    dim, qk_dim, tokens = 96, 16, 2 * 49
    windows = TokenWindows((7, 7), (7, 7))
    x, context = windows(torch.randn(2, 7, 7, dim))
    x.requires_grad_()
    block = GatedBlock(dim, cls(dim, qk_dim=qk_dim, bias_window=(7, 7), value_conv=value_conv))
    statistics = 2 * tokens  # mean and deviation of the norm
    kept = kept_for_backward(block, x, context)
    assert kept == tokens * (dim + 3 * 2 * dim + qk_dim) + statistics  # input, gate, value, mixed values, base
    assert kept_for_backward(block, x, context, True) == tokens * dim + statistics
    block.unit.recomputes = False
    assert kept_for_backward(block, x, context) > 1.9 * kept


def test_recomputing_path_follows_autocast_in_its_backward_pass():
    x, context = tokens_of(6, 6)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, global_fn="inline", bias_window=(3, 3))).float()
    gradients = []
    for recomputes in (True, False):
        unit.recomputes = recomputes
        unit.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = unit(x.float(), context)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        gradients.append([p.grad for p in unit.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


def test_gated_linear_unit_mixes_no_tokens():
    x, context = tokens_of(6, 6)
    unit = randomised(GatedLinearUnit(DIM))
    out = unit(x, context)
    torch.testing.assert_close(out[:, 1, 2], unit.proj(F.silu(unit.gate(x[:, 1, 2])) * F.silu(unit.value(x[:, 1, 2]))))
    assert torch.autograd.functional.jacobian(lambda t: unit(t, context)[0, 0, 0], x)[:, 0, 0, 1:].abs().max() == 0


def test_scale_offset_makes_each_role_of_its_own_row():
    layer = ScaleOffset(3, 2)
    with torch.no_grad():
        layer.gamma.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
        layer.beta.copy_(torch.tensor([[0.0, 0.0, 0.0], [4.0, 5.0, 6.0]]))
    first, second = layer(torch.ones(2, 3))
    assert first[0].tolist() == [1, 2, 3]
    assert second[1].tolist() == [4, 5, 6]


@pytest.mark.parametrize(("num_heads", "dtype"), list(itertools.product([1, 3], [torch.bfloat16, torch.float16])))
def test_units_run_in_low_precision(num_heads, dtype):
    x, context = tokens_of(7, 5)
    unit = MixedChunkUnit(DIM, qk_dim=12, num_heads=num_heads, global_fn="inline", bias_window=(3, 3))
    with torch.autocast("cpu", dtype=dtype):
        out = unit(x.float(), context)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert unit.to(dtype)(x.to(dtype), context).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score_fn": "relu"}, ["score_fn", "'relu2'", "'relu'"]),
        ({"divisor": "none"}, ["divisor", "'none'"]),
        ({"score_fn": "softmax", "divisor": "inside"}, ["divisor", "softmax"]),
        ({"qk_dim": 0}, ["qk_dim", "at least 1", "0"]),
        ({"num_heads": 3, "qk_dim": 8}, ["num_heads", "3", "8"]),
        ({"expansion": 0.01}, ["expansion", "at least 1"]),
        ({"global_fn": "linear"}, ["global_fn", "'linear'"]),
        ({"branches": "none"}, ["branches", "'none'"]),
    ],
)
def test_bad_arguments_are_named_with_constraint_and_value(arguments, words):
    with pytest.raises(ValueError) as error:
        MixedChunkUnit(DIM, **arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_unknown_keywords_are_an_error():
    with pytest.raises(TypeError):
        MixedChunkUnit(DIM, key_size=3)


class Scaled(torch.nn.Module):
    """What LoRA and its like do: another module in the projection's place, which has the old weight as `weight`."""

    def __init__(self, projection):
        super().__init__()
        self.projection = [projection]  # not a child
        self.weight = projection.weight

    def forward(self, x):
        return 2 * self.projection[0](x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gate", "value", "base", "proj", "value_conv"])
def test_a_replaced_or_watched_projection_is_called_and_not_bypassed(name, training):
    x, context = tokens_of(6, 6)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3), value_conv=name == "value_conv"))
    with torch.set_grad_enabled(training):
        before = unit(x, context)
        seen = []
        handle = getattr(unit, name).register_forward_hook(lambda module, args, out: seen.append(out))
        torch.testing.assert_close(unit(x, context), before)
        assert len(seen) == 1
        handle.remove()
        setattr(unit, name, Scaled(getattr(unit, name)))
        assert (unit(x, context) - before).abs().max() > 1e-3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", [{"padding": 2, "dilation": 2}, {"padding": 1, "padding_mode": "circular"}])
def test_another_convolution_in_the_place_of_the_units_is_not_taken_for_it(how, training):
    x, context = tokens_of(6, 6)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, value_conv=True))
    with torch.set_grad_enabled(training):
        before = unit(x, context)
        other = torch.nn.Conv2d(2 * DIM, 2 * DIM, 3, groups=2 * DIM, **how).double()
        other.load_state_dict(unit.value_conv.state_dict())
        unit.value_conv = other
        assert (unit(x, context) - before).abs().max() > 1e-3


def test_units_of_one_pass_share_their_buffers_and_keep_their_outputs():
    x, context = tokens_of(6, 6)
    units = [randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3))) for _ in range(2)]
    with torch.no_grad():
        first = units[0](x, context)
        kept = first.clone()
        buffers = {name: buffer.data_ptr() for name, buffer in context.buffers.items()}
        assert set(buffers) == {"inner", "mixed"}
        units[1](first, context)
    assert {name: buffer.data_ptr() for name, buffer in context.buffers.items()} == buffers
    assert torch.equal(first, kept)


def test_inference_works_under_vmap_as_in_ensembles():
    x, context = tokens_of(6, 6)
    unit = randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3)))
    with torch.no_grad():
        expected = unit(x, context)
        stacked = {name: torch.stack([p, 2 * p]) for name, p in unit.named_parameters()}
        run = torch.vmap(lambda p: torch.func.functional_call(unit, p, (x, context)))
        torch.testing.assert_close(run(stacked)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("height", "width"), [(3, 4), (7, 5)])
@pytest.mark.parametrize("kind", UNITS)
def test_inference_under_autocast_equals_the_modules_called_one_by_one(kind, height, width, dtype):
    x, context = tokens_of(height, width)
    cls, how = UNITS[kind]
    unit = randomised(cls(DIM, qk_dim=8, bias_window=(3, 3), **how)).float()
    with torch.no_grad():
        exact = unit(x.float(), context)
        with torch.autocast("cpu", dtype=dtype):
            fast = unit(x.float(), context)
            unit.shares_buffers = False
            plain = unit(x.float(), context)
    assert fast.dtype == plain.dtype == dtype
    real = slice(None) if context.key_mask is None else (slice(None), context.key_mask)
    assert (fast.float() - exact)[real].norm() <= 1.5 * (plain.float() - exact)[real].norm() + 1e-3 * exact[real].norm()


@pytest.mark.parametrize("name", ["norm", "unit", "ls", "drop_path"])
def test_what_a_hook_on_a_part_of_a_block_sees_in_training_is_the_parts_own_output_and_stays(name):
    x, context = tokens_of(6, 6)
    block = GatedBlock(DIM, randomised(MixedChunkUnit(DIM, qk_dim=8, bias_window=(3, 3)))).double()
    randomised(block.norm)
    expected = {"norm": block.norm(x)}
    expected["unit"] = expected["ls"] = expected["drop_path"] = block.unit(expected["norm"], context)
    before = block(x, context)
    seen = []
    getattr(block, name).register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(block(x, context), before)
    torch.testing.assert_close(seen[0], expected[name])
