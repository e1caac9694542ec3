"""Token kernels in a model of Hugging Face: they alone learn, and the model stays what it was.

python examples/hf_token_kernels.py                # a tiny random Qwen2
python examples/hf_token_kernels.py PATH_OR_NAME   # a model of yours, or of the hub
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mercer.integrations import hf
from mercer.nn import TokenKernels


def load(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=50, **sizes, **heads, eos_token_id=1))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = load(sys.argv[1] if len(sys.argv) > 1 else None).eval()
    # Token 7 stands beside each token: a fixed neighbour.
    ids = torch.randint(8, 50, (8, 24))
    ids[:, ::2] = 7

    with torch.no_grad():
        came = model(ids).logits
        tokens = TokenKernels.like(model, size=3, on="v", layers=[0])
        hf.patch(model, token_kernels=tokens)
        change = (model(ids).logits - came).abs().max().item()
    print(f"at the start the logits differ by {change:.0e}")

    model.requires_grad_(False)
    tokens.requires_grad_(True)
    optimizer = torch.optim.AdamW(tokens.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for _ in range(30):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f}, and {losses[-1]:.3f} after {len(losses)} steps")

    # How far the kernel of each token is from the Dirac, where it began.
    deviation = tokens.deviation()
    print(f"token 7 deviates by {deviation[7]:.3f}, token 3, which does not occur, by "
          f"{deviation[3]:.3f}")  # fmt: skip

    # Cached generation knows the ids of earlier tokens.
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids[:1])
    cached = model.generate(ids[:1], attention_mask=mask, **options)
    whole = model.generate(ids[:1], attention_mask=mask, use_cache=False, **options)
    print("the same text with and without a cache:", torch.equal(cached, whole))
