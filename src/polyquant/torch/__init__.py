"""polyquant for PyTorch: modules, autograd, `torch.compile`."""

from polyquant.torch.lora import LoRALinear, lora_, lora_state
from polyquant.torch.modules import QEmbedding, QLinear, QParameter
from polyquant.torch.replace import quantize_
from polyquant.torch.straight_through import fake_quantize

__all__ = [
    "LoRALinear",
    "QEmbedding",
    "QLinear",
    "QParameter",
    "fake_quantize",
    "lora_",
    "lora_state",
    "quantize_",
]
