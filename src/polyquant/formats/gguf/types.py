"""ggml's types by number: arrays of plain numbers, and types of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polyquant.formats.gguf.blocks import BLOCK_TYPES, BlockType
from polyquant.formats.gguf.vectors import VECTOR_TYPES

#: ggml's number of a type -> name. Missing ones were removed, or never stood in files.
TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        30: "BF16",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
        42: "Q2_0",
    }
)
TYPE_IDS: Mapping[str, int] = MappingProxyType({name: i for i, name in TYPE_NAMES.items()})

#: Types of plain numbers -> the dtype of the array.
ARRAY_TYPES: Mapping[str, npt.DTypeLike] = MappingProxyType(
    {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F64": np.float64,
        "I8": np.int8,
        "I16": np.int16,
        "I32": np.int32,
        "I64": np.int64,
    }
)
#: Types of blocks.
BLOCKS: Mapping[str, BlockType] = MappingProxyType({**BLOCK_TYPES, **VECTOR_TYPES})
