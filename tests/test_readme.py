"""README says what is so: its code runs, its table holds the counted numbers."""

import re
from pathlib import Path

import pytest
import timm

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_lines_of_use_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    scope = {}
    exec(blocks[0], scope)
    assert scope["logits"].shape == (1, 10)
    assert [tuple(m.shape) for m in scope["maps"]] == [(1, 384, 32, 40)] * 4
    assert scope["ablated"].blocks[0].unit.gate is None


def test_the_table_names_every_model_with_its_parameters():
    rows = re.findall(r"^\| `(flash_\w+)` \|[^|]*\| ([\d.]+) M \|", README, re.MULTILINE)
    assert {name for name, _ in rows} == set(timm.list_models("flash_*"))
    for name, millions in rows:
        count = sum(p.numel() for p in timm.create_model(name, device="meta").parameters())
        assert count / 1e6 == pytest.approx(float(millions), rel=0.003), name
