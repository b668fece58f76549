"""Grid files: what they expand to, and what is refused."""

import functools
from pathlib import Path

import pytest
import timm
import torch
import yaml

from flash_vision.lab.grid import load_grid, merged
from flash_vision.lab.size import check_sizes, model_sizes
from flash_vision.train.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "lab"
shipped = functools.cache(lambda name: load_grid(CONFIGS / f"{name}.yaml"))
CHOOSING = ("screening", "screening_pyramid", "screening_eurosat", "stability")
SHIPPED = (*CHOOSING, "finals", "finals_eurosat", "pyramid", "pyramid_eurosat")


def test_a_grid_is_variants_times_sweep_times_seeds_in_the_order_of_the_file(write_grid):
    groups = {
        "one": {"question": "?", "variants": ["vit"], "sweep": {"lr": [1e-3, 2e-3], "epochs": [2, 3]}},
        "two": {"question": "?", "variants": ["vit-one-head", "vit"], "seeds": [4, 5], "overrides": {"epochs": 7}},
    }
    runs = load_grid(write_grid(groups=groups)).runs()
    assert [(run.group, run.label, run.seed) for run in runs] == [
        ("one", "vit lr=0.001 epochs=2", 0),
        ("one", "vit lr=0.001 epochs=3", 0),
        ("one", "vit lr=0.002 epochs=2", 0),
        ("one", "vit lr=0.002 epochs=3", 0),
        ("two", "vit-one-head", 4),
        ("two", "vit-one-head", 5),
        ("two", "vit", 4),
        ("two", "vit", 5),
    ]
    assert [run.fields["epochs"] for run in runs] == [2, 3, 2, 3, 7, 7, 7, 7]
    assert runs[4].fields["model_kwargs"]["num_heads"] == 1
    assert runs[4].fields["model_kwargs"]["embed_dim"] == 16


def test_overrides_reach_single_model_arguments(write_grid):
    groups = {"fine": {"question": "?", "variants": ["vit"], "overrides": {"model_kwargs": {"patch_size": 4}}}}
    (run,) = load_grid(write_grid(groups=groups)).runs()
    assert run.fields["model_kwargs"] == {
        "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
    }  # fmt: skip


def test_runs_that_compute_the_same_have_the_same_key_whatever_they_are_called(write_grid):
    groups = {
        "one": {"question": "?", "variants": ["vit"]},
        "two": {"question": "?", "variants": ["vit"], "sweep": {"lr": [2e-3, 3e-3]}, "overrides": {"workers": 2}},
        "three": {"question": "?", "variants": ["vit"], "sweep": {"emulate": ["", "bfloat16"], "batch_size": [8, 16]}},
    }
    keys = {(run.group, run.label): run.key for run in load_grid(write_grid(groups=groups)).runs()}
    same = keys[("one", "vit")]
    assert [label for label, key in keys.items() if key == same] == [
        ("one", "vit"),
        ("two", "vit lr=0.002"),
        ("three", "vit emulate= batch_size=8"),
    ]
    assert len(set(keys.values())) == 5


def test_the_key_depends_on_the_images_and_the_seed(write_grid):
    images = {"train": ["noise/*-train.tar"], "classes": 3, "validation_per_class": 8}
    grids = [write_grid("a"), write_grid("b", images=images), write_grid("c", seeds=[1])]
    assert len({load_grid(grid).runs()[0].key for grid in grids}) == 3


def test_the_key_depends_on_what_decides_spikes_and_divergence_and_on_defaults(write_grid, monkeypatch):
    recipe = yaml.safe_load(write_grid().read_text())["recipe"]
    (first, _) = load_grid(write_grid()).runs()
    for change in ({"log_interval": 7}, {"max_nonfinite_steps": 7}, {"weight_decay": 0.3}):
        (other, _) = load_grid(write_grid(recipe={**recipe, **change})).runs()
        assert other.key != first.key, change
    resolved = TrainConfig.as_dict
    monkeypatch.setattr(TrainConfig, "as_dict", lambda config: resolved(config) | {"weight_decay": 0.3})
    assert load_grid(write_grid()).runs()[0].key != first.key


def test_runs_that_differ_in_the_seed_alone_are_of_one_setting(write_grid):
    runs = load_grid(write_grid(seeds=[0, 1])).runs()
    assert [len({getattr(run, name) for run in runs}) for name in ("setting", "key")] == [2, 4]


def test_null_drops_a_model_argument_that_the_extended_variant_has(write_grid):
    variants = {
        "vit": yaml.safe_load(write_grid().read_text())["variants"]["vit"],
        "plain": {"extends": "vit", "lr": 1e-3, "model_kwargs": {"num_heads": None, "depth": 3}},
        "again": {"extends": "plain", "model_kwargs": {"num_heads": 4}},
    }
    groups = {"one": {"question": "?", "variants": list(variants), "equal": "none"}}
    base, plain, again = load_grid(write_grid(variants=variants, groups=groups)).runs()
    assert plain.fields["model_kwargs"] == {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3}
    assert again.fields["model_kwargs"] == {**plain.fields["model_kwargs"], "num_heads": 4}
    assert base.fields["model_kwargs"]["num_heads"] == 2


def test_the_recipe_and_the_variants_may_stand_in_files_of_their_own(write_grid, tmp_path):
    (tmp_path / "recipe.yaml").write_text("epochs: 9\nlr: 5.0e-3\n")
    (tmp_path / "nets.yaml").write_text(yaml.safe_dump({"other": {"model": "test_vit2"}}))
    groups = {"one": {"question": "?", "variants": ["other", "vit"], "equal": "none"}}
    grid = load_grid(write_grid(base="recipe.yaml", library="nets.yaml", recipe={"lr": 1e-3}, groups=groups))
    assert grid.recipe == {"epochs": 9, "lr": 1e-3}
    assert grid.runs()[0].fields["model"] == "test_vit2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grups": {}}, r"tiny\.yaml: keys: grups is none of about, images"),
        ({"recipe": {"epoch": 3}}, r"variant vit: .*epoch"),
        ({"recipe": {"epochs": "three"}}, r"variant vit: .*epochs.*three"),
        ({"recipe": {"epochs": 0}}, r"variant vit: .*epochs must be at least 1, got 0"),
        ({"recipe": {"seed": 3}}, r"variant vit: seed is set by the laboratory"),
        ({"recipe": {"emulate": "float8"}}, r"variant vit: emulate must be one of bfloat16, float16, got 'float8'"),
        ({"images": {"train": ["x"], "classes": 3, "test": ["y"], "colour": 1}}, r"images: keys: colour is none of"),
        ({"images": {"train": ["x"], "classes": 3}}, r"images: test must be given where validation_per_class is 0"),
        ({"images": {"train": ["x"], "classes": 3, "test": ["y"], "validation_per_class": 2}}, r"only there, got"),
        ({"images": {"train": ["x"], "classes": 1, "test": ["y"]}}, r"images: classes must be at least 2, got 1"),
        ({"groups": {"g": {"question": "?", "variants": ["nit"]}}}, r"group g: variants: nit is none of vit"),
        ({"groups": {"g": {"question": "?", "variants": ["vit"], "equl": "macs"}}}, r"group g: keys: equl is none of"),
        ({"groups": {"g": {"question": "?", "variants": ["vit"], "equal": "size"}}}, r"equal must be one of .*'size'"),
        ({"groups": {"g": {"variants": ["vit"]}}}, r"group g: .*question"),
        ({"noise": 0}, r"noise must be a number above 0, got 0"),
        ({"variants": {"vit": {"extends": "other"}}}, r"variant vit: extends other, which is not there"),
        (
            {"variants": {"a": {"model": "x"}, "b": {"extends": "a", "model_kwargs": {"depth": None}}}},
            r"variant b: depth is null, which drops it, but a does not have it",
        ),
        ({"variants": {"a": {"extends": "b"}, "b": {"extends": "a"}}}, r"extends itself \(a -> b -> a\)"),
    ],
)
def test_a_mistake_in_a_grid_is_named_with_its_place(write_grid, changes, message):
    with pytest.raises(ValueError, match=message):
        load_grid(write_grid(**changes))


def test_an_unknown_group_is_named(write_grid):
    with pytest.raises(ValueError, match="grid tiny: groups: tails is none of heads"):
        load_grid(write_grid()).runs(["tails"])


def test_a_model_argument_that_does_not_exist_is_refused_before_anything_runs(write_grid):
    grid = load_grid(
        write_grid(variants={"vit": {"model": "test_vit", "model_kwargs": {"hats": 3}}, "vit-one-head": {}})
    )
    with pytest.raises(ValueError, match=r"test_vit.*hats"):
        model_sizes(grid.runs())


def test_merging_leaves_both_sides_as_they_were():
    base = {"model_kwargs": {"depth": 2, "dims": [1, 2]}, "lr": 1}
    assert merged(base, {"model_kwargs": {"dims": [3]}}) == {"model_kwargs": {"depth": 2, "dims": [3]}, "lr": 1}
    assert base == {"model_kwargs": {"depth": 2, "dims": [1, 2]}, "lr": 1}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_variants_of_every_shipped_group_are_of_one_size(name):
    grid = shipped(name)
    runs = grid.runs()
    sizes = model_sizes(runs)
    check_sizes(grid, runs, sizes)
    assert all(group.equal != "none" for group in grid.groups.values())


def test_every_shipped_grid_is_checked():
    libraries = {"variants", "recipe", "recipe_eurosat"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED) | libraries


def test_variants_of_different_size_are_refused_with_both_sizes(write_grid):
    variants = {"vit": {"model": "test_vit"}, "vit-one-head": {"extends": "vit", "model_kwargs": {"depth": 9}}}
    grid = load_grid(write_grid(variants=variants))
    runs = grid.runs()
    with pytest.raises(ValueError, match=r"group heads: parameters must lie within 5% .* for vit-one-head and .* vit"):
        check_sizes(grid, runs, model_sizes(runs))


def test_grids_that_something_is_chosen_by_never_see_a_test_image():
    for name in CHOOSING:
        images = shipped(name).images
        assert images.evaluated_on == "validation"
        assert not images.test


def test_the_vit_with_relative_positions_differs_in_nothing_else():
    variants = shipped("screening").variants
    names = {}
    for name in ("vit-timm", "vit-relpos"):
        with torch.device("meta"):
            model = timm.create_model(variants[name]["model"], **variants[name]["model_kwargs"])
        names[name] = {own: parameter.shape for own, parameter in model.named_parameters()}
    positions = {own for own in names["vit-relpos"] if own.endswith("relative_position_bias_table")}
    assert len(positions) == 6
    assert {n: s for n, s in names["vit-relpos"].items() if n not in positions} == {
        n: s for n, s in names["vit-timm"].items() if n != "pos_embed"
    }


def test_the_learning_rate_of_a_family_reaches_every_variant_of_it(write_grid):
    """A rate is edited in one place; a variant that did not follow would be compared unfairly."""
    library = yaml.safe_load((CONFIGS / "variants.yaml").read_text())
    families = {"vit-timm": 0.11, "mixed": 0.12, "quad": 0.13, "paper": 0.14}
    for name, lr in families.items():
        library[name]["lr"] = lr
    isotropic = [name for name in library if not name.startswith(("pyramid", "swin", "efficientvit"))]
    groups = {"all": {"question": "?", "variants": isotropic}}
    runs = load_grid(write_grid(variants=library, groups=groups)).runs()
    of_mixed = [run.label for run in runs if run.fields["lr"] == 0.12]
    assert {run.fields["lr"] for run in runs} == set(families.values())
    assert {"overlap", "local-overlap", "glu", "no-gate-softmax"} <= set(of_mixed)
    assert all(run.fields["lr"] == 0.11 for run in runs if run.label.startswith("vit"))
    for family, lr in (("quad", 0.13), ("paper-qk16", 0.14)):
        assert all(run.fields["lr"] == lr for run in runs if run.label.startswith(family))
