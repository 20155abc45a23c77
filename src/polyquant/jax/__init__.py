"""polyquant for JAX: trees of quantized tensors over many devices."""

from polyquant.jax.sharding import shard, shardings

__all__ = ["shard", "shardings"]
