"""Muon on a CPU: orthogonal updates, computed in float32."""

import pytest
import torch
from timm.optim import create_optimizer_v2, muon
from timm.task import ClassificationTask
from torch import nn

from flash_vision.train.config import TaskConfig
from flash_vision.train.launch import prepare_task
from flash_vision.train.muon import set_muon_precision
from flash_vision.train.parallel import Processes


@pytest.fixture
def on_cpu():
    yield set_muon_precision(torch.device("cpu"))
    set_muon_precision(torch.device("meta"))


def _direction(opt: str) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False)
    before = layer.weight.detach().clone()
    optimizer = create_optimizer_v2(layer, opt=opt, lr=1.0, weight_decay=0.0)
    layer.weight.grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    step = before - layer.weight.detach()
    return step / step.norm() * 4  # of 16 equal singular values, each 1


def test_the_update_is_nearly_orthogonal(on_cpu):
    singular = torch.linalg.svdvals(_direction("muon"))
    assert singular.max() < 1.25
    assert singular.min() > 0.6


def test_the_cpu_computes_it_in_float32_and_other_devices_in_bfloat16(on_cpu):
    exact = _direction("muon")
    set_muon_precision(torch.device("cuda"))
    rounded = _direction("muon")
    error = (exact - rounded).abs().max()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_training_run_chooses_by_its_device(device, on_cpu):
    set_muon_precision(torch.device("meta" if device == "cpu" else "cpu"))
    task = ClassificationTask(nn.Linear(4, 2), device=torch.device("cpu"), verbose=False)
    prepare_task(task, TaskConfig(opt="muon"), Processes(device=torch.device(device)), lr=1e-3)
    result = muon.zeropower_via_newtonschulz(torch.ones(2, 3), 1, [(3.0, -4.0, 2.0)])
    assert result.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
