"""When a unit may use the weights of its projections itself instead of calling them."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def is_plain(*projections: nn.Module | None) -> bool:
    """Whether each is an `nn.Linear` without bias as this library built it, that nobody has replaced or watches.

    LoRA, quantisation and parametrisation replace the module or its weight, and hooks want to see its output; a unit
    must then call the module.
    """
    return not _has_any_global_hook() and all(
        projection is None
        or (
            type(projection) is nn.Linear
            and type(projection.weight) is nn.Parameter
            and projection.bias is None
            and not projection._forward_hooks
            and not projection._forward_pre_hooks
        )
        for projection in projections
    )
