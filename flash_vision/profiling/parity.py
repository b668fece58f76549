"""Error of low precision and of compilation in a whole model, beside that of a yardstick model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_vision.profiling.build import build_model, example_input, first_line, is_out_of_memory
from flash_vision.profiling.steps import Case, autocast

# Rounding differs between architectures (a squared score doubles relative errors), a wrong kernel is off by far more.
FACTOR = 4.0
# below these relative errors a model passes whatever the yardstick does: about five roundings of the type
FLOOR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2.5e-3}


def parity_rows(models: Sequence[str], cases: Sequence[Case], *, yardstick: str) -> list[dict[str, Any]]:
    """Relative error of features ("infer") or of all gradients ("train") against eager float32, for each case.

    The error is ||x - x32|| / ||x32|| over the final feature map, or over the gradients of a fixed random projection
    of it joined into one vector. Both passes share weights and input.

    Args:
        models: timm names, with random weights.
        cases: of any mode, precision, compile flag and size.
        yardstick: model whose error in the same case, times `FACTOR`, is the limit for the others.

    Returns:
        One row per case and model: `model`, `mode`, `precision`, `compiled`, `img_size`, `error`, `limit`, `status`
        ("ok", "too large", "not finite", "out of memory", "failed: ...").
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        names = [yardstick, *(name for name in models if name != yardstick)]
        limit = FLOOR[case.precision]
        for name in names:
            error, status = _error(name, case)
            if name == yardstick and error is not None:
                limit = max(limit, FACTOR * error)
            elif error is not None and error > limit:
                status = "too large"
            row = {"model": name, "mode": case.mode, "precision": case.precision, "compiled": case.compiled}
            rows.append(row | {"img_size": case.img_size, "error": error, "limit": limit, "status": status})
    return rows


def _error(name: str, case: Case) -> tuple[float | None, str]:
    try:
        model = build_model(name, img_size=case.img_size, device=case.device)
        images = example_input(model, case.img_size, batch_size=case.batch_size, device=case.device)
        exact = _result(model, model.forward_features, images, case, exact=True)  # pyright: ignore[reportArgumentType]
        if case.compiled:
            torch._dynamo.reset()
        features: Callable = model.forward_features  # pyright: ignore[reportAssignmentType]
        run = torch.compile(features) if case.compiled else features
        result = _result(model, run, images, case, exact=False)
    except Exception as error:  # a model that fails is a row
        return None, "out of memory" if is_out_of_memory(error) else f"failed: {first_line(error)}"
    if not (result.isfinite().all() and exact.isfinite().all()):
        return None, "not finite"
    return float((result - exact).norm() / exact.norm()), "ok"


def _result(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor, case: Case, *, exact: bool) -> Tensor:
    context = autocast(case) if not exact else torch.autocast(images.device.type, enabled=False)
    if case.mode == "infer":
        with torch.no_grad(), context:
            return run(images).float().flatten()
    model.zero_grad(set_to_none=True)
    with context:
        features = run(images).float()
    generator = torch.Generator(device="cpu").manual_seed(0)
    direction = torch.randn(features.shape, generator=generator).to(features.device)
    # a sum, not a mean: gradients as small as 1 / numel would vanish in float16 without a loss scale
    (features * direction).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
