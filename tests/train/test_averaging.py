"""The mean of checkpoints, and what is refused."""

import pytest
import timm
import torch
from evaluation_samples import save_model
from safetensors.torch import load_file, save_file
from tool_process import run_tool

from flash_vision.train.averaging import average_weights
from flash_vision.train.sidecar import ModelSidecar, read_sidecar, sidecar_path, write_sidecar


def test_the_mean_is_taken_in_double_and_counters_come_from_the_last(tmp_path):
    states = [timm.create_model("test_resnet", num_classes=3).state_dict() for _ in range(3)]
    paths = []
    for number, state in enumerate(states):
        state["bn1.num_batches_tracked"] = torch.tensor(number)
        paths.append(str(tmp_path / f"{number}.{'pth' if number == 1 else 'safetensors'}"))
        torch.save({"state_dict": state}, paths[-1]) if number == 1 else save_file(state, paths[-1])
    mean = average_weights(paths)
    for key, value in mean.items():
        stack = torch.stack([state[key] for state in states])
        expected = stack.double().mean(0).to(value.dtype) if value.is_floating_point() else stack[-1]
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert mean["bn1.num_batches_tracked"] == 2


def test_the_tool_writes_safetensors_and_copies_the_sidecar(tmp_path):
    first = save_model(tmp_path / "run" / "model.safetensors", seed=1)
    second = save_model(tmp_path / "other" / "model.safetensors", seed=2)
    sidecar = ModelSidecar(
        model="test_vit",
        num_classes=3,
        class_names=("a", "b", "c"),
        input_size=(3, 160, 160),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        interpolation="bicubic",
        crop_pct=0.95,
    )
    write_sidecar(sidecar_path(first), sidecar)
    output = tmp_path / "mean" / "model.safetensors"
    done = run_tool("average_checkpoints", "--output", output, first, second)
    assert done.code == 0, done.stderr
    mean, one, two = (load_file(path) for path in (output, first, second))
    assert mean.keys() == one.keys()
    torch.testing.assert_close(mean["head.weight"], (one["head.weight"] + two["head.weight"]) / 2)
    assert read_sidecar(sidecar_path(output)) == sidecar
    before = output.read_bytes()
    assert "already there" in run_tool("average_checkpoints", "--output", output, first, second).refused()
    assert output.read_bytes() == before


def test_one_checkpoint_is_stored_in_half_precision(tmp_path):
    weights = save_model(tmp_path / "run" / "model.safetensors")
    output = tmp_path / "half" / "model.safetensors"
    assert run_tool("average_checkpoints", "--output", output, "--dtype", "float16", weights).code == 0
    full, half = load_file(weights), load_file(output)
    assert half.keys() == full.keys()
    for key, value in full.items():
        torch.testing.assert_close(half[key], value.half() if value.is_floating_point() else value, rtol=0, atol=0)
    assert output.stat().st_size < 0.55 * weights.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--output", "{tmp}/mean.safetensors", "{a}"], "one and a dtype, got 1"),
        (["--output", "{tmp}/mean.pth", "{a}", "{a}"], "must end in .safetensors"),
        (["--output", "{tmp}/mean.safetensors", "{a}", "{tmp}/none.pth"], "none.pth: no such file"),
        (["--output", "{tmp}/mean.safetensors", "{a}", "{tmp}/text.pth"], "text.pth: cannot be read"),
        (["--output", "{tmp}/mean.safetensors", "{a}", "{tmp}/wide.safetensors"], "head.bias is (4,)"),
        (["--output", "{tmp}/mean.safetensors", "{a}", "{tmp}/resnet.safetensors"], "keys differ"),
        (["--output", "{tmp}/mean.safetensors", "{tmp}/inf.safetensors", "{a}"], "not finite"),
        (["--output", "{tmp}/mean.safetensors", "--dtype", "float16", "{tmp}/large.safetensors"], "not finite"),
        (["--output", "{tmp}/mean.safetensors", "--dtype", "int8", "{a}"], "dtype"),
        (["{a}", "{a}"], "output"),
    ],
)
def test_a_mistake_ends_in_one_line_and_nothing_is_written(tmp_path, arguments, named):
    good = save_model(tmp_path / "a.safetensors")
    save_model(tmp_path / "wide.safetensors", num_classes=4)
    save_model(tmp_path / "resnet.safetensors", "test_resnet")
    state = load_file(good)
    state["head.bias"][0] = torch.inf
    save_file(state, tmp_path / "inf.safetensors")
    state["head.bias"][0] = 1e5  # beyond float16
    save_file(state, tmp_path / "large.safetensors")
    (tmp_path / "text.pth").write_text("text")
    filled = [text.replace("{tmp}", str(tmp_path)).replace("{a}", str(good)) for text in arguments]
    assert named in run_tool("average_checkpoints", *filled).refused()
    assert not list(tmp_path.glob("*mean*"))
