"""polyquant for PyTorch: modules, autograd, `torch.compile`."""

from polyquant.torch.lora import LoRALinear, lora_, lora_state
from polyquant.torch.modules import QEmbedding, QLinear, QParameter
from polyquant.torch.replace import quantize_

__all__ = [
    "LoRALinear",
    "QEmbedding",
    "QLinear",
    "QParameter",
    "lora_",
    "lora_state",
    "quantize_",
]
