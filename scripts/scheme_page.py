"""docs/schemes.md: the grammar, every preset, and the parts that schemes are made of."""

from __future__ import annotations

import inspect
import sys

import markdown
from markdown import table

from polyquant.calibrate import METHODS
from polyquant.data import data_size_bytes
from polyquant.scheme import QuantScheme, presets
from polyquant.tables import NAMED, named_table
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

EXTENT = 4096


def page() -> str:
    """The page."""
    return markdown.page(
        [
            "# Schemes",
            "A scheme says what the codes of a tensor mean: "
            "`x[i] ~ decode(code[i]) * scale[block(i)]`, or with an offset "
            "`(decode - zero) * scale` or `decode * scale + bias`. `pq.scheme(text)` reads a "
            "preset's name or a text form; `str(scheme)` gives the text form, and "
            "`scheme.to_json()` the form that files hold.",
            "## Text form",
            "```text\n" + grammar() + "\n```",
            "An `extent` is a number of elements or `*` for a whole axis; extents are aligned to "
            "the last axes of the tensor, so `32` is 32 elements of a row, `128x128` a square of "
            "the last two axes, `row` one block a row and `tensor` one block for everything. The "
            "last block of a line may be short. A scale in parentheses is a scheme itself: the "
            "scales are quantized by it. `parse(str(s)) == s` for every scheme.",
            "Files of other tools need three more things. `divisor.f32` and `absmax.f32` say that "
            "the outermost scale is stored as a number to divide by, or as a largest magnitude. "
            "After `~` stands a view: lines and blocks are those of the tensor reshaped to it, so "
            "`~flat` lets blocks run on across the ends of rows. `~grouped` says that the tensor "
            "brings a map from the elements of its last axis to the blocks along it. Such schemes "
            "have `scheme.extras`, by which kernels decline; the definition runs them all.",
            "## Presets",
            f"Bits per element count everything stored, for a tensor of {EXTENT} x {EXTENT}.",
            table(
                ["preset", "text form", "bits per element", "value", "block", "scale"],
                [_preset_row(name, scheme) for name, scheme in presets().items()],
            ),
            "## Value types",
            "`f` is a full range, `s` a symmetric one, `u` unsigned; `eXmY` are minifloats with X "
            "exponent and Y mantissa bits. Under a table only the width of the code counts.",
            table(
                ["value", "bits", "range"],
                [[f"`{v}`", str(v.bits), f"{v.range[0]:g} to {v.range[1]:g}"] for v in QuantValue],
            ),
            "## Scale types",
            table(
                ["scale", "bytes", "stored as", "largest"],
                [[f"`{s}`", str(s.size_bytes), s.storage, f"{s.max:g}"] for s in ScaleDtype],
            ),
            "## Tables",
            "`u4[nf4]` looks codes up in a named table, `u4[custom]` in one that the tensor "
            'brings (`table=`, or `table="kmeans"` to fit one).',
            table(
                ["table", "entries", "from", "to"],
                [_table_row(name) for name in NAMED],
            ),
            "## Stores",
            "`@packed_native` or `@native` after a scheme says where the bits of a line lie; "
            "`packed_u32` is the default.",
            table(
                ["store", "a line of codes is"],
                [[f"`{store}`", STORES[store]] for store in QuantStore],
            ),
            "## Modes",
            f"{', '.join(f'`{mode}`' for mode in QuantMode)}. An offset makes a scheme affine and "
            "a table makes it a lookup, so the text form does not name the mode.",
            "## Calibrations",
            "`pq.quantize(x, scheme, calibration=...)` chooses the scales:",
            table(
                ["calibration", "what it does"],
                [[f"`{name}`", _summary(method)] for name, (method, _) in METHODS.items()],
            ),
        ]
    )


STORES = {
    QuantStore.PACKED_U32: "one bit stream, lowest bits first, padded to whole 32-bit words",
    QuantStore.PACKED_NATIVE: "the same stream, padded to whole bytes",
    QuantStore.NATIVE: "one byte a code, sign-extended for signed integers",
}


def grammar() -> str:
    """The grammar as scheme.py documents it."""
    document = inspect.getdoc(sys.modules[QuantScheme.__module__]) or ""
    lines = document.partition("::\n\n")[2].splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith(" "))
    return inspect.cleandoc("\n".join(lines[:end]))


def _preset_row(name: str, scheme: QuantScheme) -> list[str]:
    bits = 8 * data_size_bytes(scheme, (EXTENT, EXTENT)) / EXTENT**2
    block = str(scheme).partition("/")[2].partition(":")[0]
    value = f"{scheme.value}[{scheme.table}]" if scheme.table else str(scheme.value)
    scale = str(scheme.scale) + (" under one f32" if scheme.tensor_scale else "")
    return [f"`{name}`", f"`{scheme}`", f"{bits:.2f}", value, block, scale]


def _table_row(name: str) -> list[str]:
    entries = named_table(name)
    return [f"`{name}`", str(entries.size), f"{entries.min():g}", f"{entries.max():g}"]


def _summary(method: object) -> str:
    """The first line of a function's docstring."""
    return (inspect.getdoc(method) or "").partition("\n")[0].replace("``", "`")
