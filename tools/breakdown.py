"""Where the time of a step goes, by kind of operator: python tools/breakdown.py flash_gau_small vit_small_patch16_224.

For inference also the forward pass over its own dense products alone, which is how far it is from its limit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flash_vision.profiling.breakdown import Breakdown, break_down, dense_floor
from flash_vision.profiling.build import build_model, example_input, first_line
from flash_vision.profiling.environment import environment
from flash_vision.profiling.steps import Case
from flash_vision.profiling.tables import markdown_table, write_json
from flash_vision.train.command_line import run_tool


@dataclass(frozen=True, kw_only=True)
class BreakdownConfig(Case):
    """One case, see `Case`, for one or several models.

    Args:
        models: timm names.
        steps: profiled steps.
        rounds: alternating timings of forward pass and dense products, for mode "infer".
        top: operators in the table per model.
        threads: CPU threads of torch; 0 leaves torch's own number.
        json: file for everything; empty for none.
    """

    models: Sequence[str]
    steps: int = 5
    rounds: int = 10
    top: int = 12
    threads: int = 0
    json: str = ""


def main(config: BreakdownConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    results: list[dict[str, Any]] = []
    for name in config.models:
        results.append(_one(name, config))
    if config.json:
        data = {"environment": environment(config.device), "settings": dataclasses.asdict(config), "models": results}
        write_json(config.json, data)


def _one(name: str, config: BreakdownConfig) -> dict[str, Any]:
    model = build_model(name, img_size=config.img_size, device=config.device)
    images = example_input(model, config.img_size, batch_size=config.batch_size, device=config.device)
    try:
        with torch.no_grad():
            model(images)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot take {config.img_size} px: {first_line(error)}") from error
    breakdown = break_down(model, images, config, steps=config.steps)
    print(f"\n## {name}: {breakdown.total_ms:.1f} ms per step in operators")
    _print(breakdown, config.top)
    result = {"model": name, **breakdown.as_dict()}
    if config.mode == "infer":
        floor = dense_floor(model, images, config, rounds=config.rounds)
        spread = f"(quartiles {floor.ratio_q25:.3f} to {floor.ratio_q75:.3f})"
        print(
            f"\nforward {floor.forward_ms:.1f} ms, its {floor.products} dense products alone {floor.dense_ms:.1f} ms:"
        )
        print(f"{floor.ratio:.3f} {spread} times its dense products")
        result["dense_floor"] = dataclasses.asdict(floor)
    return result


def _print(breakdown: Breakdown, top: int) -> None:
    print("\n" + markdown_table(breakdown.rows()))
    operators = [
        {"operator": n, "kind": k, "ms": ms, "calls": calls} for n, k, ms, calls in breakdown.by_operator[:top]
    ]
    print("\n" + markdown_table(operators))
    for form, ms in breakdown.attention.items():
        print(f"\n{ms:.2f} ms of the forward pass inside {form} attention")
    if breakdown.unknown:
        print(f"\nUNKNOWN operators: {', '.join(breakdown.unknown)}")


if __name__ == "__main__":
    sys.exit(run_tool(main, BreakdownConfig, description=__doc__, positional="models"))
