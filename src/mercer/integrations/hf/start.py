"""From softmax to RBF without a broken model: a start as softmax, and a path from there.

    w = exp(-|q - k|^2 / 2 s^2) exp(c |k|^2 / 2 s^2),  1 / s^2 = the scale of the model

is softmax at c = 1 and RBF at c = 0 (`Bridge`). c is a parameter. `leave_softmax` bounds it:

    0 <= c <= 1 - progress,  progress = step / steps
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ...kernels import RBF, Bridge
from .host import Host
from .layers import attention_layers
from .patch import base_of, host_of, is_patched, record


def leave_softmax(model: nn.Module, progress: float) -> None:
    """Bound c of every layer by 1 - progress: call it after each step of the optimizer.

        hf.leave_softmax(model, progress=step / steps)

    From progress 1 on, the kernels are RBF.
    """
    if not (isinstance(progress, int | float) and math.isfinite(progress) and progress >= 0):
        raise ValueError(f"progress must be a number from 0 to 1, got {progress!r}")
    bridges = [bridge for _, bridge in _bridges(model)]
    with torch.no_grad():
        for bridge in bridges:
            bridge.c.clamp_(0.0, max(1.0 - progress, 0.0))


def to_rbf(model: nn.Module) -> None:
    """At the end of the path: the same model, with plain RBF as its kernels."""
    found = _bridges(model)
    for host, bridge in found:
        c = bridge.c.item()
        if c != 0:
            raise ValueError(
                f"c of layer {host.number} is {c:.3g}, so it is no RBF yet: bring it to 0 by "
                "hf.leave_softmax(model, progress=1)"
            )
        if bridge.relative_to_default and bridge.scale is None:
            raise ValueError(
                f"the scale of layer {host.number} is not known before its first call: call the "
                "model once"
            )
    for host, bridge in found:
        host.set(_rbf(bridge))
    base = base_of(model)
    record(base, attention_layers(base))


def _bridges(model: nn.Module) -> list[tuple[Host, Bridge]]:
    """The hosts whose kernel is a bridge."""
    hosts = [host_of(x) for x in attention_layers(base_of(model)) if is_patched(x)]
    found = [(host, host.kernel) for host in hosts if isinstance(host.kernel, Bridge)]
    if not found:
        raise ValueError(
            "no layer of the model leads from softmax to RBF: patch it with "
            'kernel="RBF(heads=8)", start="as-softmax"'
        )
    return found


def _rbf(bridge: Bridge) -> RBF:
    log = bridge.log_bandwidth.detach()
    heads = log.numel() if log.dim() else None
    rbf = RBF(1.0, heads=heads, trainable=isinstance(bridge.log_bandwidth, nn.Parameter))
    log = log + math.log(bridge.default(1)) if bridge.relative_to_default else log
    rbf = rbf.to(log.device)
    rbf.log_bandwidth.data.copy_(log)
    return rbf
