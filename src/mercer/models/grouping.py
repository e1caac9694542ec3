"""Groups of parameters with their own learning rates."""

from __future__ import annotations

from torch import nn

from ..kernels import AdaptiveRBF, ALiBi, Bridge, Periodic, Scaled
from ..kernels.distance import Distance
from ..kernels.stationary import Wave
from ..nn import GaussianAttention, TokenKernels

GROUPS = ("bandwidth", "token_kernels", "rest")


def groups(model: nn.Module) -> dict[str, list[str]]:
    """The names of a model's parameters: "bandwidth", "token_kernels" and "rest".

    Bandwidths are log_bandwidth, the weights of per-query bandwidths, c of `Bridge`, periods,
    frequencies, learned slopes, and the weights of a mixture.
    """
    group: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, TokenKernels):
            group[id(module.weight)] = "token_kernels"
        elif isinstance(module, Distance | GaussianAttention):
            group[id(module.log_bandwidth)] = "bandwidth"
            if isinstance(module, AdaptiveRBF):
                group[id(module.weight)] = "bandwidth"
            if isinstance(module, GaussianAttention) and module.adaptive:
                group[id(module.steering)] = "bandwidth"
            if isinstance(module, Bridge):
                group[id(module.c)] = "bandwidth"
            if isinstance(module, Periodic):
                group[id(module.log_period)] = "bandwidth"
        elif isinstance(module, Scaled):
            group[id(module.log_scale)] = "bandwidth"
        elif isinstance(module, Wave):
            group[id(module.frequency)] = "bandwidth"
        elif isinstance(module, ALiBi):
            group[id(module.slopes)] = "bandwidth"
    named: dict[str, list[str]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        named[group.get(id(parameter), "rest")].append(name)
    return named
