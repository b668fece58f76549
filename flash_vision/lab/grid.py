"""A grid: named variants of one recipe, in groups that each answer a question, times seeds.

Adding a variant is adding lines of YAML; the format is described in docs/lab.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from flash_vision.lab.images import Images
from flash_vision.lab.rounding import EMULATED
from flash_vision.train.config import FREE_FIELDS, TrainConfig

# what the laboratory itself sets in each run
RESERVED = frozenset({"data_dir", "dataset", "train_split", "val_split", "seed", "device", "output", "experiment"})
# what changes where and how fast a run goes, not what comes out; the batch counts here, as a run has one process, and
# so does what decides which losses are seen and when a run gives up
NEUTRAL = FREE_FIELDS - {"batch_size", "grad_accum_steps", "global_batch_size", "log_interval", "max_nonfinite_steps"}
EQUAL = ("parameters", "macs", "none")
GRID_KEYS = ("about", "images", "base", "recipe", "noise", "seeds", "library", "variants", "groups")
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One question and the variants that answer it.

    Args:
        question: what the group is to answer.
        variants: names of variants; differences are given against the first one.
        overrides: recipe fields for all of them.
        sweep: fields and the values that each takes; every variant is run with every combination.
        seeds: instead of the grid's.
        equal: what the variants have in common, within TOLERANCE: parameters, macs, or none.
    """

    question: str
    variants: Sequence[str]
    overrides: Fields = field(default_factory=dict)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    seeds: Sequence[int] | None = None
    equal: str = "parameters"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a grid.

    Args:
        group: name of its group.
        label: variant, with the values of a sweep.
        seed: of weights, order and augmentation.
        fields: of TrainConfig, those of RESERVED left out.
        emulate: low precision that matrix products are rounded to, see `rounding.RoundedProducts`; "" for none.
    """

    group: str
    label: str
    seed: int
    fields: Fields
    emulate: str
    images: Images

    @functools.cached_property
    def decisive(self) -> Fields:
        """What of the configuration decides the outcome, the defaults included, so that a changed one counts."""
        fields = self.train_config().as_dict()
        return {name: value for name, value in fields.items() if name not in NEUTRAL | RESERVED}

    @functools.cached_property
    def setting(self) -> str:
        """Equal for runs that differ in their seed alone, whatever they are called."""
        return _digest([self.decisive, self.emulate, dataclasses.asdict(self.images)])

    @property
    def key(self) -> str:
        """Equal for runs that compute the same, whatever they are called."""
        return _digest([self.setting, self.seed])

    def experiment(self, folder: Path) -> str:
        """Name of the run's folder below the grid's: the one that is there under any label, or a new one."""
        found = sorted(path.name for path in folder.glob(f"*-{self.key}"))
        return found[0] if found else f"{re.sub(r'[^0-9a-zA-Z_.+=-]+', '_', self.label)}-s{self.seed}-{self.key}"

    def train_config(
        self, *, data_dir: str = "-", output: str = "-", experiment: str = "-", device: str = "cpu"
    ) -> TrainConfig:
        """The configuration of tools/train.py, with every type checked.

        Raises:
            ValueError: an unknown field, or a value that it does not take.
        """
        where = {"data_dir": data_dir, "output": output, "device": device, "experiment": experiment}
        return parse_train_config(
            {**self.fields, **where, "seed": self.seed, "val_split": self.images.evaluated_on}, f"variant {self.label}"
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid file as read; see `load_grid`.

    Args:
        noise: deviation between seeds in percent of top-1, for reports of results that do not show it themselves.
    """

    name: str
    about: str
    images: Images
    recipe: Fields
    noise: float | None
    seeds: Sequence[int]
    variants: dict[str, Fields]
    groups: dict[str, Group]

    def runs(self, groups: Sequence[str] = ()) -> list[Run]:
        """The runs of the named groups, all by default, in the order of the file.

        A run that computes the same as an earlier one stands in the list too, with the same key.

        Raises:
            ValueError: no such group.
        """
        _only(groups, self.groups, f"grid {self.name}: groups")
        found: list[Run] = []
        for name, group in self.groups.items():
            if groups and name not in groups:
                continue
            for variant, values in itertools.product(group.variants, _combinations(group.sweep)):
                fields = merged(self.recipe, merged(merged(self.variants[variant], group.overrides), values))
                label = " ".join([variant, *(f"{key}={value}" for key, value in values.items())])
                emulate = fields.pop("emulate", "")
                for seed in self.seeds if group.seeds is None else group.seeds:
                    found.append(
                        Run(group=name, label=label, seed=seed, fields=fields, emulate=emulate, images=self.images)
                    )
        return found


def load_grid(path: str | Path) -> Grid:
    """Reads a grid file and checks every name and every run's configuration in it.

    Raises:
        ValueError: not YAML, an unknown key, a missing one, or a value out of range; file and place are named.
    """
    path = Path(path)
    content = _read(path)
    try:
        _only(content, GRID_KEYS, "keys")
        missing = [key for key in ("about", "images", "seeds", "groups") if key not in content]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}")
        recipe = _with_file(path, content, "base", "recipe")
        variants = _with_file(path, content, "library", "variants")
        grid = Grid(
            name=path.stem,
            about=content["about"],
            images=_build(Images, content["images"], "images"),
            recipe=recipe,
            noise=_positive_or_none(content.get("noise"), "noise"),
            seeds=content["seeds"],
            variants={name: _resolve(variants, name) for name in variants},
            groups={name: _build(Group, group, f"group {name}") for name, group in content["groups"].items()},
        )
        for name, group in grid.groups.items():
            _only(group.variants, grid.variants, f"group {name}: variants")
            if group.equal not in EQUAL:
                raise ValueError(f"group {name}: equal must be one of {', '.join(EQUAL)}, got {group.equal!r}")
        for run in grid.runs():
            _check(run)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return grid


def distinct(runs: Iterable[Run]) -> list[Run]:
    """The runs without those that compute the same as an earlier one."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.key, run)
    return list(found.values())


@functools.lru_cache(maxsize=1)
def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, as_group=False)  # pyright: ignore[reportArgumentType]
    return parser


def parse_train_config(fields: Mapping[str, Any], who: str) -> TrainConfig:
    """TrainConfig of plain data, with the types checked as on the command line.

    Args:
        who: whose fields they are, for messages.
    Raises:
        ValueError: an unknown field, or a value that it does not take.
    """
    try:
        return TrainConfig(**_parser().parse_object(dict(fields), defaults=False).as_dict())
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{who}: {' '.join(str(error).split())}") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> Fields:
    """`base` with the fields of `other`; mappings in both, as model_kwargs, are merged key by key."""
    result = dict(base)
    for key, value in other.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _check(run: Run) -> None:
    reserved = sorted(RESERVED & run.fields.keys())
    if reserved:
        raise ValueError(f"variant {run.label}: {reserved[0]} is set by the laboratory")
    if run.emulate not in ("", *EMULATED):
        raise ValueError(f"variant {run.label}: emulate must be one of {', '.join(EMULATED)}, got {run.emulate!r}")
    run.train_config()


def _combinations(sweep: Mapping[str, Sequence[Any]]) -> list[Fields]:
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]


def _resolve(variants: Mapping[str, Any], name: str, seen: tuple[str, ...] = ()) -> Fields:
    """The fields of a variant with those of the one that it extends."""
    if name not in variants:
        raise ValueError(f"variant {seen[-1]}: extends {name}, which is not there")
    if name in seen:
        raise ValueError(f"variant {name}: extends itself ({' -> '.join((*seen, name))})")
    own = dict(variants[name] or {})
    base = own.pop("extends", None)
    if base is None:
        return own
    fields = merged(_resolve(variants, base, (*seen, name)), own)
    dropped = {key for key, value in own.get("model_kwargs", {}).items() if value is None}
    if dropped:  # what another model or unit does not take
        unknown = sorted(dropped - _resolve(variants, base).get("model_kwargs", {}).keys())
        if unknown:
            raise ValueError(f"variant {name}: {unknown[0]} is null, which drops it, but {base} does not have it")
        fields["model_kwargs"] = {k: v for k, v in fields["model_kwargs"].items() if k not in dropped}
    return fields


def _with_file(path: Path, content: Mapping[str, Any], file_key: str, key: str) -> Fields:
    """What the file named under `file_key`, if any, and the mapping under `key` hold together."""
    base = _read(path.parent / content[file_key]) if content.get(file_key) else {}
    return base | (content.get(key) or {})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping, got {type(content).__name__}")
    return content


def _build(kind: Any, content: Any, where: str) -> Any:
    known = [entry.name for entry in dataclasses.fields(kind)]
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a mapping, got {content!r}")
    _only(content, known, f"{where}: keys")
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _positive_or_none(value: Any, where: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise ValueError(f"{where} must be a number above 0, got {value!r}")
    return value


def _only(names: Any, known: Any, where: str) -> None:
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise ValueError(f"{where}: {unknown[0]} is none of {', '.join(known)}")
