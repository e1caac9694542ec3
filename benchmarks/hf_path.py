"""The loss of a trained language model on its way from softmax to RBF, by fine-tuning.

    python benchmarks/hf_path.py MODEL --kernel 'RBF(heads=9)' --start as-softmax

MODEL is what `mercer train lm --init` takes. The text is the embedded one. No files are written;
the last line is JSON. Without --start it is RBF from the first step on, without --kernel softmax.
"""

import argparse
import json
import time

from mercer.train import Settings, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kernel")
    parser.add_argument("--start")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--items", type=int, default=1024)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--bandwidth-lr", type=float)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    options = {} if given.start is None else {"start": given.start}
    settings = Settings(
        init=given.model, kernel=given.kernel, system_options=options, steps=given.steps,
        batch=given.batch, length=given.length, eval_items=given.items, samples=False,
        learning_rate=given.lr, bandwidth_rate=given.bandwidth_lr, threads=given.threads,
        eval_every=max(1, given.steps // 10), log_every=1,
    )  # fmt: skip
    begun = time.perf_counter()

    def show(progress: object) -> None:
        if progress.metrics is not None:
            loss = progress.metrics["eval_loss"]
            seconds = time.perf_counter() - begun
            print(f"step {progress.step:4d}  loss {loss:.4f}  {seconds:.0f} s", flush=True)

    result = run(settings, show)
    curve = {row["step"]: row["eval_loss"] for row in result.history if "eval_loss" in row}
    losses = [row["loss"] for row in result.history if "loss" in row]
    found = {"losses": losses, "validation": curve, "seconds": result.seconds}
    print(json.dumps({"settings": vars(given), **found}))


if __name__ == "__main__":
    main()
