"""The argument of encode.cu's kernels, field by field as it stands there."""

from __future__ import annotations

import ctypes


class Inner(ctypes.Structure):
    """What encode.cu calls Inner."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "steps", "table")),
        *((name, ctypes.c_float) for name in ("range", "low", "high")),
        ("stride", ctypes.c_uint32),
    )


class Divider(ctypes.Structure):
    """What encode.cu calls Divider."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("by", "factor", "shift"))

    @classmethod
    def of(cls, by: int) -> Divider:
        shift = 31 + (by - 1).bit_length()
        return cls(by, -(-(1 << shift) // by), shift)


class Operands(ctypes.Structure):
    """What encode.cu calls Operands."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "codes", "scales", "offsets", "tensor_scale", "steps", "work", "seen")
        ),
        *(
            (name, ctypes.c_float)
            for name in ("range", "by", "inverse", "span", "bottom", "scale_max")
        ),
        *((name, ctypes.c_uint32) for name in ("intervals", "origin")),
        *((name, ctypes.c_uint32) for name in ("blocks", "count", "group", "tiles", "shift")),
        *((name, ctypes.c_uint32) for name in ("h1", "h2", "e0", "e1", "e2", "c1", "c2")),
        *((name, ctypes.c_int64) for name in ("length", "extent", "stride")),
        *((name, Divider) for name in ("lines", "rows")),
        ("inner", Inner * 2),
        *((name, ctypes.c_uint32) for name in ("unit", "extents", "inner_count")),
    )
