"""The state in a checkpoint besides the model: optimiser, random numbers, step.

The state is gathered from all processes by parameter name. So it is the same for one process, DDP
and FSDP2, and each can load the checkpoints of the others.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU, in the main process; collective."""
    found: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return found


def spread_model(model: nn.Module, weights: dict[str, Tensor], several: bool) -> None:
    """Load weights that the main process has, into all processes or shards; collective."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    given: dict[str, Any] = dict(weights)
    set_model_state_dict(model, given, options=options)


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's states as `parameter/state`, on the CPU; collective."""
    found = {}
    for name, parameter in model.named_parameters():
        # A parameter without a gradient so far has no states; keep it so.
        for key, value in optimizer.state.get(parameter, {}).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
            found[f"{name}/{key}"] = whole.detach().cpu().contiguous()
    return found


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load each parameter's states, or this process's shard of them."""
    from safetensors.torch import load_file

    parameters = dict(model.named_parameters())
    for name, value in load_file(folder / "optimizer.safetensors").items():
        owner, key = name.rsplit("/", 1)
        parameter = parameters[owner]
        if value.shape != parameter.shape:
            # Adam's step count: a scalar, on the CPU unless Adam is fused.
            fused = optimizer.param_groups[0].get("fused")
            optimizer.state[parameter][key] = value.to(parameter.device) if fused else value
        elif isinstance(parameter, DTensor):
            optimizer.state[parameter][key] = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements
            )
        else:
            optimizer.state[parameter][key] = value.to(parameter.device)


def gather_random() -> list[dict[str, Any]]:
    """The generator states of each process; collective."""
    own = capture_random()
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def capture_random() -> dict[str, Any]:
    """The states of all generators, as JSON."""
    import numpy

    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(s.tolist()).hex() for s in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    import numpy

    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(text) for text in state["cuda"]])


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """Restore all generators afterwards, whatever is drawn inside."""
    before = capture_random()
    try:
        yield
    finally:
        restore_random(before)


def seed_all(seed: int, *places: int) -> None:
    """Seed all generators from a seed, the process and the step."""
    import numpy

    state = numpy.random.SeedSequence([seed, *places]).generate_state(1, numpy.uint32)
    number = int(state[0])
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
