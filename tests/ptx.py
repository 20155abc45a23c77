"""The PTX that Pallas kernels are made of, run by NumPy: what a GPU would compute, lane by lane.

``elementwise_inline_asm`` stands in for Pallas's own. An argument is (threads, 8), and a thread's
row is packed in registers of 32 bits. Only instructions that the kernels use are known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import ml_dtypes
import numpy as np

Registers = dict[str, Any]


def elementwise_inline_asm(
    asm: str,
    *,
    args: Sequence[Any],
    constraints: str,
    pack: int,
    result_shape_dtypes: Sequence[Any],
) -> Any:
    """The results of PTX for rows of ``pack`` numbers."""
    (result,) = result_shape_dtypes

    def run(*given: Any) -> Any:
        rows = [np.asarray(x).reshape(-1, pack) for x in given]
        words = [x.view(np.uint32) for x in rows]
        count = pack * np.dtype(result.dtype).itemsize // 4
        names = iter(f"${i}" for i in range(count, 1 + constraints.count(",")))
        registers = {next(names): x[:, i].copy() for x in words for i in range(x.shape[1])}
        assert next(names, None) is None
        execute(asm, registers)
        made = np.stack(np.broadcast_arrays(*(registers[f"${i}"] for i in range(count))), axis=1)
        return made.view(result.dtype).reshape(result.shape)

    return [jax.pure_callback(run, result, *args)]


def execute(asm: str, registers: Registers) -> None:
    for instruction, names in parsed(asm):
        step(instruction, names, registers)


@lru_cache(maxsize=4096)
def parsed(asm: str) -> list[tuple[str, list[str]]]:
    """Instructions with their operands."""
    found = []
    for statement in asm.split(";"):
        text = re.sub(r"^[\s{}]+", "", statement).strip()
        if text and not text.startswith(".reg"):
            instruction, _, operands = text.partition(" ")
            names = [name.strip() for name in re.findall(r"\{[^}]*\}|[^,{}]+", operands)]
            found.append((instruction, [name for name in names if name]))
    return found


def step(instruction: str, names: list[str], registers: Registers) -> None:
    """One instruction: the first operand is written."""
    to, *sources = names
    if to.startswith("{") and instruction == "mov.b32":  # to a pair of halves
        low, high = listed(to)
        whole = value(sources[0], registers)
        registers[low], registers[high] = whole & 0xFFFF, whole >> 16
        return
    if instruction.startswith("mma."):
        a, b, c = ([value(name, registers) for name in listed(part)] for part in sources)
        registers.update(zip(listed(to), multiply(a, b, c), strict=True))
        return
    # What ptxas refuses, NumPy would take.
    assert not instruction.startswith("fma") or not any(name[0].isdigit() for name in sources)
    registers[to] = INSTRUCTIONS[instruction](*(value(name, registers) for name in sources))


def listed(group: str) -> list[str]:
    return [name.strip() for name in group.strip("{} ").split(",")]


def value(name: str, registers: Registers) -> Any:
    if name.startswith("0f"):
        return np.uint32(int(name[2:], 16))
    return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]


def f32(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).view(np.float32)


def halves(bits: Any) -> tuple[Any, Any]:
    """The low and the high half of a register, bfloat16, as float64.

    By their fields: XLA's threads, which call this, take subnormal float32 numbers for zeros.
    """
    bits = np.asarray(bits, np.uint32)
    parts = [x.astype(np.int64) for x in (bits & 0xFFFF, bits >> 16)]
    low, high = (_from_fields(x >> 15, x >> 7 & 0xFF, x & 0x7F) for x in parts)
    return low, high


def _from_fields(sign: Any, exponent: Any, mantissa: Any) -> Any:
    size = np.ldexp(mantissa + np.where(exponent > 0, 128.0, 0.0), np.maximum(exponent, 1) - 134)
    size = np.where(exponent == 255, np.where(mantissa > 0, np.nan, np.inf), size)
    return np.where(sign == 1, -size, size)


def joined(low: Any, high: Any, kind: Any) -> Any:
    low, high = (np.asarray(x).astype(kind).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    made = np.uint32(0)
    for i in range(8):
        if int(table) >> i & 1:
            each = zip((a, b, c), (i >> 2 & 1, i >> 1 & 1, i & 1), strict=True)
            x, y, z = (part if bit else ~part for part, bit in each)
            made = made | (x & y & z)
    return made


def prmt(a: Any, b: Any, selector: Any) -> Any:
    source = [(x >> 8 * i) & 0xFF for x in (a, b) for i in range(4)]
    shape = np.broadcast_shapes(*(np.shape(x) for x in (a, b, selector)))
    bytes_ = np.stack([np.broadcast_to(x, shape) for x in source])
    made = np.zeros(shape, np.uint32)
    for i in range(4):
        choice = np.broadcast_to(selector >> np.uint32(4 * i) & 0xF, shape)
        assert np.all(choice < 8)
        made |= np.take_along_axis(bytes_, choice[None].astype(np.int64), 0)[0] << np.uint32(8 * i)
    return made


def fma_bf16x2(a: Any, b: Any, c: Any) -> Any:
    parts = zip(*(halves(x) for x in (a, b, c)), strict=True)
    low, high = (x * y + z for x, y, z in parts)
    return joined(low, high, ml_dtypes.bfloat16)


def fma_f32(a: Any, b: Any, c: Any) -> Any:
    a, b, c = (f32(x).astype(np.float64) for x in (a, b, c))
    return (a * b + c).astype(np.float32).view(np.uint32)


def from_e4m3(codes: Any) -> Any:
    low, high = (
        x.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
        for x in (codes & 0xFF, codes >> 8)
    )
    return joined(low, high, np.float16)


def from_f16(bits: Any) -> Any:
    low = np.asarray(bits & 0xFFFF).astype(np.uint16).view(np.float16)
    return low.astype(np.float32).view(np.uint32)


INSTRUCTIONS: dict[str, Any] = {
    "mov.b32": lambda x: x,
    "mov.f32": lambda x: x,
    "shl.b32": lambda x, by: x << by,
    "shr.b32": lambda x, by: x >> by,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma_bf16x2,
    "fma.rn.f32": fma_f32,
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "cvt.f32.f16": from_f16,
    "cvt.rn.bf16x2.f32": lambda high, low: joined(f32(low), f32(high), ml_dtypes.bfloat16),
}


def multiply(a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """``mma.m16n8k16`` of every warp: c (16, 8) + a (16, 16) @ b (16, 8), bfloat16 in float32."""
    threads = max(np.size(x) for x in a)
    lane, warp = np.arange(threads) % 32, np.arange(threads) // 32
    g, t = lane // 4, lane % 4
    left = np.zeros((threads // 32, 16, 16))
    right = np.zeros((threads // 32, 16, 8))
    for i, register in enumerate(a):
        for half, part in enumerate(halves(register)):
            left[warp, g + i % 2 * 8, 2 * t + half + i // 2 * 8] = part
    for i, register in enumerate(b):
        for half, part in enumerate(halves(register)):
            right[warp, 2 * t + half + i * 8, g] = part
    total = left @ right
    made = []
    for i, register in enumerate(c):
        here = total[warp, g + i // 2 * 8, 2 * t + i % 2]
        made.append((f32(register) + here).astype(np.float32).view(np.uint32))
    return made
