"""polyquant for PyTorch: modules, autograd, ``torch.compile``."""
