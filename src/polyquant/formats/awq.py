"""AWQ: 4-bit integers in the layouts gemm, gemv and gemv_fast.

gemm packs along the output, eight columns in an int32 in the order 0 2 4 6 1 3 5 7; gemv along the
input, in natural order; gemv_fast interleaves four rows and runs of 32 columns, and stores biases
``-scale * zero`` in place of zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import unpack
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore, QuantValue

NAME = "awq"
FACTS = Facts(
    tool="AutoAWQ, llm-awq",
    reads="4 bits: gemm, gemv, gemv_fast",
    exact="bit-equal",
)
_BITS, _PER_WORD = 4, 8
#: Where column j of eight lies in a word of the layout gemm.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_OWN_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}.items()


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives group_size and version.

    Raises InvalidHeader, UnsupportedDtype.
    """
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    config = dict(source.config)
    for own, usual in _OWN_NAMES:
        config.setdefault(usual, config.get(own))
    version = str(config.get("version", "gemm")).lower()
    if source.number("bits", config) != _BITS or version not in _LAYOUTS:
        variant = f"{version} of {config.get('bits')} bits"
        raise source.refuse("the config", variant, [f"{v} of 4 bits" for v in _LAYOUTS])
    group_size = source.number("group_size", config)
    for base in source.names(".qweight"):
        yield _LAYOUTS[version](source, base, group_size)


def _size(source: Source, columns: int, group_size: int) -> int:
    size = columns if group_size == -1 else group_size
    if size < 1 or columns % size:
        raise source.fail(f"groups of {group_size} do not divide {columns} columns")
    return size


def _uses(base: str) -> tuple[str, ...]:
    return tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))


def _natural(words: HostArray) -> HostArray:
    """Nibbles of int32 words along the last axis, lowest first."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    length = words.shape[-1] * _PER_WORD
    made: HostArray = unpack(np, stream, length, QuantValue.U4, QuantStore.PACKED_U32)
    return made


# -- gemm -------------------------------------------------------------------------------------


def _gemm(source: Source, base: str, group_size: int) -> Layer:
    columns, words = source.expect(f"{base}.qweight", ("I32",), (None, None)).shape
    rows, size = words * _PER_WORD, _size(source, columns, group_size)
    source.expect(f"{base}.qzeros", ("I32",), (columns // size, words))
    scale = source.scale(f"{base}.scales", (columns // size, rows))
    scheme = QuantScheme("u4", block=size, scale=scale, offset="zero_point:u4")
    read = partial(_read_gemm, source, base, scheme, (rows, columns))
    return Layer(f"{base}.weight", (rows, columns), scheme, _uses(base), read)


def _read_gemm(source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]) -> QTensor:
    def turned(name: str) -> HostArray:
        """``(lines, rows)`` in the order of a word as ``(rows, lines)``."""
        found = _natural(source.read(name))
        lines = found.reshape(len(found), -1, _PER_WORD)[..., list(_ORDER)]
        return np.ascontiguousarray(lines.reshape(len(found), -1).T)

    numbers = {
        "codes": turned(f"{base}.qweight"),
        "offsets": turned(f"{base}.qzeros"),
        "scales": source.read(f"{base}.scales").T,
    }
    return assemble(scheme, shape, numbers)


# -- gemv -------------------------------------------------------------------------------------


def _gemv(source: Source, base: str, group_size: int) -> Layer:
    rows, words = source.expect(f"{base}.qweight", ("I32",), (None, None)).shape
    columns = words * _PER_WORD
    groups = columns // _size(source, columns, group_size)
    zeros = source.expect(f"{base}.qzeros", ("I32",), (rows, None))
    if zeros.shape[1] * _PER_WORD < groups:
        raise source.fail(f"tensor {zeros.name!r} has fewer zero points than {groups} groups")
    scale = source.scale(f"{base}.scales", (rows, zeros.shape[1] * _PER_WORD))
    scheme = QuantScheme("u4", block=columns // groups, scale=scale, offset="zero_point:u4")
    read = partial(_read_gemv, source, base, scheme, (rows, columns), groups)
    return Layer(f"{base}.weight", (rows, columns), scheme, _uses(base), read)


def _read_gemv(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int], groups: int
) -> QTensor:
    numbers = {
        "codes": _natural(source.read(f"{base}.qweight")),
        "offsets": _natural(source.read(f"{base}.qzeros"))[:, :groups],
        "scales": source.read(f"{base}.scales")[:, :groups],
    }
    return assemble(scheme, shape, numbers)


# -- gemv_fast --------------------------------------------------------------------------------


def _gemv_fast(source: Source, base: str, group_size: int) -> Layer:
    quarter, columns = source.expect(f"{base}.qweight", ("I16",), (None, None)).shape
    rows, groups = 4 * quarter, columns // _size(source, columns, group_size)
    if columns % 64:
        raise source.fail(f"gemv_fast has runs of 64 columns, and '{base}.qweight' {columns}")
    padded = source.raw(f"{base}.scales").shape[0] if f"{base}.scales" in source else 0
    scale = source.scale(f"{base}.scales", (None, rows))
    source.expect(f"{base}.qzeros", (source.raw(f"{base}.scales").dtype,), (padded, rows))
    if padded < groups:
        raise source.fail(f"'{base}.scales' has {padded} rows for {groups} groups")
    scheme = QuantScheme("u4", block=columns // groups, scale=scale, offset=f"bias:{scale}")
    read = partial(_read_gemv_fast, source, base, scheme, (rows, columns), groups)
    return Layer(f"{base}.weight", (rows, columns), scheme, _uses(base), read)


def _read_gemv_fast(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int], groups: int
) -> QTensor:
    rows, columns = shape
    words = source.read(f"{base}.qweight").view(np.uint16)
    # Each int16 has a nibble of four rows; a run of 64 columns is one row of 64 after another.
    nibbles = (words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)).astype(np.uint8) & 15
    lanes = nibbles.reshape(rows // 4, columns // 64, 4, 64).transpose(0, 2, 1, 3)
    runs = lanes.reshape(rows, columns // 32, 4, 2, 4)
    # Within 32: of eight neighbours first the even, then the odd ones; then pairs 8 columns apart.
    eights = runs.transpose(0, 1, 2, 4, 3).reshape(rows, columns // 32, 4, 4, 2)
    codes = eights.transpose(0, 1, 3, 2, 4).reshape(shape)
    numbers = {
        "codes": np.ascontiguousarray(codes),
        "scales": source.read(f"{base}.scales")[:groups].T,
        "offsets": source.read(f"{base}.qzeros")[:groups].T,
    }
    return assemble(scheme, shape, numbers)


_LAYOUTS: Mapping[str, Callable[[Source, str, int], Layer]] = MappingProxyType(
    {"gemm": _gemm, "gemv": _gemv, "gemv_fast": _gemv_fast, "llm-awq": _gemv_fast}
)
