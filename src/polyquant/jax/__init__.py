"""polyquant for JAX: training through rounding, stacks of tensors, tensors over many devices."""

from polyquant.jax import ffi
from polyquant.jax.sharding import shard, shardings
from polyquant.jax.stacks import stack
from polyquant.jax.straight_through import fake_quantize

__all__ = ["fake_quantize", "shard", "shardings", "stack"]

ffi.register()
