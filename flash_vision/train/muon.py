"""timm's Muon on a CPU."""

from functools import partial

import torch
from timm.optim import muon

_newton_schulz = muon.zeropower_via_newtonschulz


def set_muon_precision(device: torch.device) -> None:
    """Lets timm's Muon and AdaMuon orthogonalise in float32 on a CPU, and in bfloat16, as they do, elsewhere.

    timm fixes bfloat16, products of which run 10 times slower than float32 ones on a CPU that has no instructions for
    them. The choice holds for the process, whose optimisers all belong to one device.
    """
    in_float32 = partial(_newton_schulz, dtype=torch.float32)
    muon.zeropower_via_newtonschulz = in_float32 if device.type == "cpu" else _newton_schulz
