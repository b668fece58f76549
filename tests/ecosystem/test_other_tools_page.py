"""The snippets of docs/other_tools.md run as they stand."""

import json
import re
from pathlib import Path

import pytest
import timm
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "other_tools.md"
SECTIONS = {title: body for title, _, body in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])}
NEEDS = {
    "segmentation-models-pytorch": "segmentation_models_pytorch",
    "torchvision detectors": "torchvision",
    "Hugging Face transformers": "transformers",
    "open_clip": "open_clip",
}


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[title], flags=re.DOTALL)


def test_every_section_with_code_is_run():
    assert {title for title in SECTIONS if blocks(title, "python")} == set(NEEDS)


@pytest.mark.parametrize("title", NEEDS)
def test_the_snippet_of_a_section_runs(title, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS[title], reason=f"needs {NEEDS[title]}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for content in blocks(title, "json"):
        (tmp_path / "configs" / "clip-flash.json").write_text(json.dumps(json.loads(content)))
    for code in blocks(title, "python"):
        names = {"__name__": "snippet"}
        exec(code, names)
        assert any(isinstance(value, nn.Module) for value in names.values())  # it has built something
        if "encoder_in_channels" in code:
            channels = timm.create_model("flash_pyramid_tiny", features_only=True).feature_info.channels()
            assert names["detector"].config.encoder_in_channels == channels[1:]
