"""The numeric cases taken from Burn's tests: which there are, and what comes out otherwise here.

A case is a dict: ``id``, ``op``, ``scheme`` (Burn's fields), ``input`` or ``input_gen``, ``shape``,
``args``, ``expected``, ``tolerance``. What runs one is in burn_storage.py and burn_ops.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import burn_ops
import burn_storage
from burn_terms import Case

#: The files whose operations exist here. (The others belong to files of Burn's own.)
TOPICS = (
    "scheme",
    "calibration",
    "quantize",
    "pack_unpack",
    "data_layout",
    "minifloat",
    "accuracy",
    "matmul",
    "autodiff",
)
#: The files of operations on quantized tensors, by the start of their names.
OPERATIONS = "ops_*.json"

#: Cases, or whole operations, of Burn's inside that nothing here corresponds to.
NOT_OURS = MappingProxyType(
    {
        "quant_vector_size": "the vector width of Burn's kernels; a kernel here states its own",
        "cast-qfloat-to-float": "TensorData has no cast that could refuse",
    }
)

_SMALLER = "an edge that cuts a block makes smaller blocks, exactly"
_RESHAPED = MappingProxyType(
    {
        "expect_error": False,
        "expected_kind": "float",
        "expected": {"same_as": "input"},
        "tolerance": {"rel": 0.01, "abs": 0.01},
    }
)
_ZERO_EXTENT = MappingProxyType({"expect_error": True, "expected": None})
#: Of 2 in [0, 5] or [-3, 3] 8 bits make 2.008, of 1 in [-3, 3] 0.992, and of 4 in [0, 5] 4.016.
_NOISE = "the stored number is beside the whole one"
_REMAINDERS = [1.0, 1.992126, 1.007874, 0.992126, 0.007874, 1.0]

#: Cases that come out differently here on purpose: what changes in the case, and why.
OTHERWISE = MappingProxyType(
    {
        "roundup-defined-for": (
            {"expected": dict.fromkeys(("F32", "F16", "BF16", "UE8M0", "UE4M3"), True)},
            "UE8M0 rounds up to the next power of two",
        ),
        "quantizable-3": ({"expected": True}, "UE8M0 scales can be quantized with"),
        "quantizable-4": ({"expected": True}, "UE8M0 scales can be quantized with"),
        "ndarray-packed-default-declined": (
            {"expected": True},
            "every store works on every backend",
        ),
        "lookup-native": (
            {"expected": True, "expect_error": False},
            "lookup works over every store",
        ),
        "packed-block8-Q2S-too-small": (
            {
                "expect_error": False,
                "expected": [-1, -1, 0, 0] * 2
                + [0, 1, 1, 1] * 2
                + [1, 1, 0, 0] * 2
                + [0, -1, -1, -1] * 2,
            },
            "a block need not fill a word",
        ),
        "packed-last-dim-not-multiple": (
            {"expect_error": False, "expected": [20, 127, 40, 60, 20, 60]},
            "a line is padded to whole words",
        ),
        # Layouts: what Burn refuses is exact here.
        "packed-reshape-nd-block-flatten": (_RESHAPED | {"expected_shape": [32]}, _SMALLER),
        "packed-reshape-native-split-rows": (_RESHAPED | {"expected_shape": [4, 16]}, _SMALLER),
        "packed-reshape-packed-split-rows": (_RESHAPED | {"expected_shape": [4, 16]}, _SMALLER),
        "narrow-zero": (
            {
                "expect_error": False,
                "expected_kind": "float",
                "expected_shape": [0, 3],
                "expected": [],
            },
            "a part without elements is a tensor, as in NumPy and torch",
        ),
        "split_with_sizes-zero-part": (
            {"expected": [[], [0.0], [2.0, 5.0]], "expected_shape": [[0], [1], [2]]},
            "a part of size 0 is not left out, as in torch",
        ),
        "reshape-infer-1": (_ZERO_EXTENT, "0 is a length, as in NumPy and torch"),
        "reshape-infer-3": (_ZERO_EXTENT, "0 is a length, as in NumPy and torch"),
        # Burn skips these: it states numbers that 8 bits do not hold. Here are those that they do.
        "equal_scalar-a": ({"expected": [False] * 6}, _NOISE),
        "not_equal_scalar-a": ({"expected": [True] * 6}, _NOISE),
        "lower_equal_scalar-a": ({"expected": [True] * 4 + [False] * 2}, _NOISE),
        "remainder_scalar-basic": ({"expected": _REMAINDERS}, _NOISE),
        "remainder_scalar-operator": ({"expected": _REMAINDERS}, _NOISE),
    }
)

#: Operation of a case -> what runs it.
OPS: MappingProxyType[str, Callable[[Case, str], None]] = MappingProxyType(
    dict(burn_storage.OPS) | dict(burn_ops.OPS)
)


def load(folder: Path) -> list[Case]:
    """All cases of the topics and operations, each with its topic."""
    topics = [*TOPICS, *sorted(path.stem for path in folder.glob(OPERATIONS))]
    return [
        case | {"topic": topic}
        for topic in topics
        for case in json.loads((folder / f"{topic}.json").read_text("utf-8"))
    ]


def is_ours(case: Case) -> bool:
    """Whether the case has a counterpart here."""
    return case["id"] not in NOT_OURS and case["op"] not in NOT_OURS


def run(case: Case, device: str) -> None:
    """Run a case that must not raise."""
    changes, _ = OTHERWISE.get(case["id"], ({}, ""))
    OPS[case["op"]](case | changes, device)


def must_raise(case: Case) -> bool:
    """Whether the case is an error, here."""
    changes, _ = OTHERWISE.get(case["id"], ({}, ""))
    return bool((case | changes).get("expect_error"))
