"""Fine-tune a quantized model: low-rank adapters (LoRA) over frozen nf4 layers.

The model, all-MiniLM-L6-v2, learns which sentence follows another in Python's reference: in a batch
of 8 pairs, each first sentence has to find its second. There is no layer on top, so that what the
loss loses is what the adapters learn.

    python examples/finetune.py [--steps 50]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from encoder import embed, evenly, load_encoder, sentences, tokenize

from polyquant.torch import lora_, quantize_

SCHEME = "nf4"
STEPS, BATCH, LEARNING_RATE = 50, 8, 1e-3
PAIRS = 40
#: The loss is shown as the mean of so many steps: two passes over all pairs.
SHOWN = 2 * PAIRS // BATCH
#: What cosines are multiplied by before the softmax, as when the model itself was trained.
SHARPNESS = 20.0
#: The longest sentence that is learned from, in characters: short ones are quick.
LONGEST = 70

Pair = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{2 * SHOWN} or more")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model, tokenizer = load_encoder()
    lora_(quantize_(model, SCHEME), rank=8, alpha=16)
    pairs = neighbours()
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{SCHEME} model, {learned:,} numbers to train, {len(pairs)} pairs of sentences")

    before = base_bytes(model)
    losses = train(model, tokenizer, pairs, steps)
    frozen = base_bytes(model) == before

    first, last = statistics.fmean(losses[:SHOWN]), statistics.fmean(losses[-SHOWN:])
    if not frozen or last >= first:
        print(f"Failed: loss {first:.3f} to {last:.3f}, base {'' if frozen else 'not '}the same.")
        return 1
    print(
        f"In {steps} steps the loss fell from {first:.3f} to {last:.3f}, "
        "and not a byte of the quantized model has changed."
    )
    return 0


def train(model: torch.nn.Module, tokenizer: Any, pairs: Sequence[Pair], steps: int) -> list[float]:
    """Take ``steps`` steps on what requires gradients; the loss of each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    losses: list[float] = []
    for batch in itertools.islice(batches(pairs), steps):
        optimizer.zero_grad()
        loss = pair_loss(model, tokenizer, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % SHOWN == 0:
            mean = statistics.fmean(losses[-SHOWN:])
            print(f"step {len(losses):3}: loss {mean:.3f}", flush=True)
    return losses


def pair_loss(model: torch.nn.Module, tokenizer: Any, batch: Sequence[Pair]) -> torch.Tensor:
    """Cross-entropy of finding each second sentence among all those of the batch."""
    texts = [first for first, _ in batch] + [second for _, second in batch]
    first, second = embed(model, tokenize(tokenizer, texts)).chunk(2)
    return torch.nn.functional.cross_entropy(SHARPNESS * first @ second.T, torch.arange(len(batch)))


def neighbours() -> list[Pair]:
    """Pairs of short sentences, the next of one topic each time; no sentence is in two pairs."""
    short = [sentence for sentence in sentences() if len(sentence.text) <= LONGEST]
    found = zip(short[::2], short[1::2], strict=False)
    return evenly([(a.text, b.text) for a, b in found if a.topic == b.topic], PAIRS)


def batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Batches for ever: all pairs in random order, then again in another."""
    while True:
        order = torch.randperm(len(pairs)).tolist()
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield [pairs[i] for i in order[start : start + BATCH]]


def base_bytes(model: torch.nn.Module) -> str:
    """A digest of all that the model holds and does not train."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if name not in trained:
            found.update(name.encode())
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
