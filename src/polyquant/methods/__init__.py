"""What a QTensor can do, as mixins: each method is one call of an operation."""

from polyquant.methods.compute import ComputeMethods
from polyquant.methods.door import operations
from polyquant.methods.layout import LayoutMethods
from polyquant.methods.protocols import Protocols

__all__ = ["ComputeMethods", "LayoutMethods", "Protocols", "operations"]
