"""Error of low precision and of compilation in a whole model, beside what rounding its weights alone does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_vision.profiling.build import build_model, example_input, first_line, is_out_of_memory
from flash_vision.profiling.steps import PRECISIONS, Case, autocast

# Autocast rounds every product's operands, not only the weights; a wrong kernel is off by far more.
FACTOR = 4.0
# below these relative errors a model passes in any case: about five roundings of the type
FLOOR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2.5e-3}


def parity_rows(models: Sequence[str], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Relative error of features ("infer") or of all gradients ("train") against eager float32, for each case.

    The error is ||x - x32|| / ||x32|| over the final feature map, or over the gradients of a fixed random projection
    of it joined into one vector. How much rounding a random network bears depends on its depth and width, so the limit
    is `FACTOR` times the error of the same network in float32 with its weights rounded to the type once.

    Args:
        models: timm names, with random weights.
        cases: of any mode, precision, compile flag and size.

    Returns:
        One row per case and model: `model`, `mode`, `precision`, `compiled`, `img_size`, `error`, `limit`, `status`
        ("ok", "too large", "not finite", "out of memory", "failed: ...").
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        for name in models:
            error, limit, status = _compare(name, case)
            row = {"model": name, "mode": case.mode, "precision": case.precision, "compiled": case.compiled}
            rows.append(row | {"img_size": case.img_size, "error": error, "limit": limit, "status": status})
    return rows


def _compare(name: str, case: Case) -> tuple[float | None, float | None, str]:
    try:
        model = build_model(name, img_size=case.img_size, device=case.device)
        images = example_input(model, case.img_size, batch_size=case.batch_size, device=case.device)
        features: Callable[[Tensor], Tensor] = model.forward_features  # pyright: ignore[reportAssignmentType]
        exact = _result(model, features, images, case, exact=True)
        if case.compiled:
            torch._dynamo.reset()
        run = torch.compile(features) if case.compiled else features
        result = _result(model, run, images, case, exact=False)
        rounded = _rounded_weights(model, features, images, case)
    except Exception as error:  # a model that fails is a row
        return None, None, "out of memory" if is_out_of_memory(error) else f"failed: {first_line(error)}"
    if not (result.isfinite().all() and exact.isfinite().all()):
        return None, None, "not finite"
    error = _relative(result, exact)
    limit = max(FLOOR[case.precision], FACTOR * _relative(rounded, exact))
    return error, limit, "ok" if error <= limit else "too large"


def _relative(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


def _rounded_weights(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor, case: Case) -> Tensor:
    """The float32 result with weights and images rounded to the case's type; rounds them in place, so it comes last."""
    dtype = PRECISIONS[case.precision] or torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return _result(model, run, images.to(dtype).float(), case, exact=True)


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
