"""model.json: what is written is read back, and nothing else is accepted."""

import dataclasses
import json

import pytest

from flash_vision.train.sidecar import ModelSidecar, read_sidecar, sidecar_path, write_sidecar

FIELDS = {
    "model": "test_vit",
    "model_kwargs": {"img_size": 32, "drop_path_rate": 0.1},
    "num_classes": 2,
    "class_names": ["zéro", "one"],
    "input_size": [3, 32, 48],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.2, 0.2, 0.2],
    "interpolation": "bilinear",
    "crop_pct": 1.0,
}


def test_what_is_written_is_read_back_and_no_temporary_file_stays(tmp_path):
    sidecar = ModelSidecar(**FIELDS)
    path = sidecar_path(tmp_path / "model.safetensors")
    write_sidecar(path, sidecar)
    assert read_sidecar(path) == sidecar
    assert json.loads(path.read_text(encoding="utf-8")) == FIELDS
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.json"]


def test_data_config_has_the_names_of_timm():
    config = ModelSidecar(**FIELDS).data_config
    assert config["input_size"] == (3, 32, 48)
    assert set(config) == {"input_size", "mean", "std", "interpolation", "crop_pct"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": 3}, "model must"),
        ({"num_classes": "2"}, "num_classes"),
        ({"num_classes": True}, "num_classes"),
        ({"num_classes": 3}, "class_names must be as long as num_classes=3, got 2"),
        ({"class_names": "ab"}, "class_names"),
        ({"class_names": [0, 1]}, "class_names"),
        ({"input_size": [32, 32]}, "input_size"),
        ({"input_size": [3, 32.0, 32]}, "input_size"),
        ({"mean": [0.5]}, "mean"),
        ({"std": [0.2, 0.2, 0]}, "std"),
        ({"std": None}, "std"),
        ({"interpolation": "cubic"}, "interpolation"),
        ({"crop_pct": "1"}, "crop_pct"),
        ({"model_kwargs": []}, "model_kwargs"),
        ({"model_kwargs": {"num_classes": 2}}, "model_kwargs"),
        ({"colour": "red"}, "unknown key"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_and_field(tmp_path, change, named):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(FIELDS | change))
    with pytest.raises(ValueError, match=named) as error:
        read_sidecar(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_a_missing_key_is_an_error_that_names_it(tmp_path, key):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({name: value for name, value in FIELDS.items() if name != key}))
    with pytest.raises(ValueError, match=f"missing key.*{key}"):
        read_sidecar(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_file_that_is_no_json_object_is_an_error(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="JSON"):
        read_sidecar(path)


def test_model_kwargs_that_json_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="plain JSON data"):
        ModelSidecar(**FIELDS | {"model_kwargs": {"norm_layer": dataclasses}})
