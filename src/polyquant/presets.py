"""Schemes with a name of their own."""

from __future__ import annotations

from types import MappingProxyType


def _grid_presets() -> dict[str, str]:
    blocks = {"tensor": "tensor:f32", "row": "row:f32", "32": "32:f16"}
    return {
        f"{value}-{name}": f"{value}/{levels}"
        for value in ("q8s", "q8f", "q4s", "q4f", "q2s")
        for name, levels in blocks.items()
    }


#: Name -> text form, which scheme.py reads. A new preset is one line here.
PRESETS = MappingProxyType(
    {
        **_grid_presets(),
        "int8": "q8s/row:f32",
        "fp8-tensor": "e4m3/tensor:f32",
        "fp8-row": "e4m3/row:f32",
        "fp8-128x128": "e4m3/128x128:f32",
        "mxfp4": "e2m1/32:ue8m0",
        "mxfp6-e2m3": "e2m3/32:ue8m0",
        "mxfp6-e3m2": "e3m2/32:ue8m0",
        "mxfp8": "e4m3/32:ue8m0",
        "mxfp8-e5m2": "e5m2/32:ue8m0",
        "nvfp4": "e2m1/16:ue4m3/tensor:f32",
        "nf4": "u4[nf4]/64:f32",
        "nf4-double": "u4[nf4]/64:(u8[dynamic8u]/256:f32)",
        "fp4": "u4[fp4]/64:f32",
        "af4": "u4[af4]/64:f32",
        "iq4_nl": "u4[iq4_nl]/32:f16",
        "ternary": "q2s/tensor:f32",
    }
)
