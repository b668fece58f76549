"""When a unit may use the weights of its norm and its projections itself instead of calling the modules."""

from timm.layers import LayerNorm
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def is_watched(module: nn.Module) -> bool:
    """Whether a forward hook waits for the module to be called."""
    return bool(_has_any_global_hook() or module._forward_hooks or module._forward_pre_hooks)


def is_plain(*projections: nn.Module | None) -> bool:
    """Whether each is an `nn.Linear` without bias as this library built it, that nobody has replaced or watches.

    LoRA, quantisation and parametrisation replace the module or its weight, and hooks want to see its output; a unit
    must then call the module.
    """
    return all(
        projection is None
        or (
            type(projection) is nn.Linear
            and type(projection.weight) is nn.Parameter
            and projection.bias is None
            and not is_watched(projection)
        )
        for projection in projections
    )


def is_plain_norm(norm: nn.Module) -> bool:
    """The same of a layer norm with scale and shift."""
    return (
        type(norm) is LayerNorm
        and not norm._fast_norm
        and type(norm.weight) is nn.Parameter
        and type(norm.bias) is nn.Parameter
        and not is_watched(norm)
    )


def is_plain_convolution(convolution: nn.Module | None) -> bool:
    """The same of a unit's depthwise 3x3 convolution of V, or of none."""
    return convolution is None or (
        type(convolution) is nn.Conv2d
        and type(convolution.weight) is nn.Parameter
        and type(convolution.bias) is nn.Parameter
        and convolution.groups == convolution.in_channels == convolution.out_channels
        and (convolution.kernel_size, convolution.padding) == ((3, 3), (1, 1))
        and convolution.stride == convolution.dilation == (1, 1)
        and convolution.padding_mode == "zeros"
        and not is_watched(convolution)
    )
