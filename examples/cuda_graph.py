"""Full speed at short lengths: one attention layer called, compiled, and as a CUDA graph.

At short lengths a call from Python takes the CPU longer than the GPU. A CUDA graph records the GPU
work of a call once and replays it, so the CPU starts one graph in place of a dozen kernels. torch
has two ways to make one, and both work with Mercer as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import mercer as mc

BATCH, LENGTH, WIDTH, HEADS = 8, 1024, 768, 12


def layer() -> mc.nn.KernelAttention:
    """The same layer each time, in bfloat16 on the GPU; its bandwidths stay in float32."""
    torch.manual_seed(0)
    attention = mc.nn.KernelAttention(WIDTH, HEADS, kernel=mc.RBF(heads=HEADS), filter=mc.Causal())
    attention.to("cuda", torch.bfloat16).kernel.float()
    return attention


def milliseconds(module: Callable[[Tensor], Tensor], x: Tensor, repeats: int = 50) -> float:
    """Forward and backward, the mean of many calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(repeats + 10):
        if step == 10:
            start.record()
        module(x).sum().backward()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def ways(x: Tensor) -> dict[str, nn.Module]:
    """Three ways to run one layer."""
    graphed = layer()
    # The first call checks the kernels for this GPU, and makes the tensors that depend on the
    # length alone, such as sinusoids. A graph can do neither.
    graphed(x).sum().backward()
    graphed.zero_grad()
    return {
        "called from Python": layer(),
        'torch.compile(mode="reduce-overhead")': torch.compile(layer(), mode="reduce-overhead"),
        "torch.cuda.make_graphed_callables": torch.cuda.make_graphed_callables(graphed, (x,)),
    }


def main() -> None:
    if not torch.cuda.is_available():
        print("CUDA graphs need a CUDA GPU, and there is none here.")
        return
    # A graph reads its inputs from the memory of the sample, so shapes must stay as they are.
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for name, module in ways(x).items():
        print(f"{milliseconds(module, x):7.3f} ms  {name}")


if __name__ == "__main__":
    main()
