"""Whole models: checkpoints quantized, compared and swept one tensor at a time."""
