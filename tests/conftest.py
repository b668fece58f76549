"""Shared test setup: one thread per worker, a fixed seed for every test."""

import pytest
import torch

import flash_vision  # noqa: F401 (registers the models)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
