"""Layout operations: the same numbers in other places, exactly, and still quantized."""
