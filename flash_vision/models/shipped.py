"""Weights that come with the package: flash_vision/weights/MODEL.TAG/ as timm's pretrained cfg of that name.

A folder holds model.safetensors (half precision), the model.json of the training tool beside it, and README.md, the
model card.
"""

import json
from pathlib import Path
from typing import Any, Dict

WEIGHTS = Path(__file__).parents[1] / "weights"


def shipped_cfg(name: str) -> Dict[str, Any]:
    """Fields of timm's pretrained cfg for the weights of `name`, MODEL.TAG: the file, its classes, its preprocessing.

    Raises:
        FileNotFoundError: no such weights, or the package was installed without its data files.
    """
    folder = WEIGHTS / name
    described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    return {
        "file": str(folder / "model.safetensors"),
        "num_classes": described["num_classes"],
        "label_names": tuple(described["class_names"]),
        "input_size": tuple(described["input_size"]),
        "mean": tuple(described["mean"]),
        "std": tuple(described["std"]),
        "interpolation": described["interpolation"],
        "crop_pct": described["crop_pct"],
    }
