"""The loss of a trained language model on its way from softmax to RBF, by fine-tuning.

    python benchmarks/hf_path.py MODEL --kernel 'RBF(heads=9)' --start as-softmax --output FOLDER

MODEL is what `mercer train lm --init` takes. The text is the embedded one. Attention learns, with
its bandwidths; the rest stays, so that a step is cheap on a CPU. The last line is JSON. Stopped by
Ctrl-C, the same command goes on. Without --start the kernel is RBF from the first step on, without
--kernel softmax.
"""

import argparse
import json

from mercer.integrations.hf.layers import attention_layers
from mercer.train import Settings, run


def freeze(model: object) -> None:
    """All but attention."""
    model.requires_grad_(False)
    for layer in attention_layers(model):
        layer.module.requires_grad_(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kernel")
    parser.add_argument("--start")
    parser.add_argument("--output")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--bandwidth-lr", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    options = {} if given.start is None else {"start": given.start}
    settings = Settings(
        init=given.model, kernel=given.kernel, system_options=options, steps=given.steps,
        batch=given.batch, length=given.length, eval_items=given.items, samples=False,
        learning_rate=given.lr, bandwidth_rate=given.bandwidth_lr, threads=given.threads,
        eval_every=max(1, given.steps // 10), save_every=given.steps, keep=1, log_every=1,
        output=given.output, resume=given.output is not None,
    )  # fmt: skip

    def show(progress: object) -> None:
        if progress.metrics is not None:
            print(f"step {progress.step:4d}  loss {progress.metrics['eval_loss']:.4f}", flush=True)

    result = run(settings, show, alter=freeze)
    curve = {row["step"]: row["eval_loss"] for row in result.history if "eval_loss" in row}
    losses = [row["loss"] for row in result.history if "loss" in row]
    print(json.dumps({"settings": vars(given), "losses": losses, "validation": curve}))


if __name__ == "__main__":
    main()
