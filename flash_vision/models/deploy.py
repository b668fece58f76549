"""The form of a model that only infers."""

from timm.models import reparameterize_model
from torch import nn


def optimize_for_inference(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """The same function of an image, equal to rounding, without what only training needs.

    Folds LayerScale into the output projection; other layers fold as timm's `reparameterize_model` knows. Drops dropout
    and stochastic depth, freezes the weights and sets evaluation mode. Under `torch.no_grad()` each gated unit then
    adds its output onto the tokens in place, so what a hook keeps of one block is overwritten by the next.

    Not folded: the norm's scale and shift, since projections would need biases, which cost a pass over their output.

    Args:
        model: any timm model.
        inplace: change the model itself instead of a copy.

    Returns:
        The model. It can still be compiled, exported and moved; set its dtype instead of using autocast.
    """
    model = reparameterize_model(model, inplace=inplace)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, nn.Identity())
    return model.eval().requires_grad_(False)
