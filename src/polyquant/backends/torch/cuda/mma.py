"""Products of float rows with a quantized weight on tensor cores, by CUDA C++ on torch's tensors.

``backends/nvidia/planning.py`` says what runs. Here are the addresses, and launches that a weight
keeps.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from polyquant.backends.nvidia import planning
from polyquant.backends.nvidia.planning import (
    Doubly,
    Grids,
    Lines,
    Operands,
    Plan,
    Shapes,
    Tiled,
    step_of,
)
from polyquant.backends.nvidia.schemes import type_number
from polyquant.backends.nvidia.tiles import Tiles
from polyquant.backends.torch.cuda import decode, nvrtc, products
from polyquant.backends.torch.cuda.planes import split_planes
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor

OUT = MappingProxyType({getattr(torch, name): each for name, each in planning.OUT.items()})
PLANES = MappingProxyType({getattr(torch, name): each for name, each in planning.PLANES.items()})


def matmul(x: torch.Tensor, weight: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weight``, accumulated in float32: x (..., m, k) or (k,), weight (..., k, n).

    The weight's last two axes are stored last, in either order; its other axes are those of ``x``
    or are broadcast against (what that cannot be is dequantized for cuBLAS).
    """
    if x.is_neg():  # kernels read bytes; a view's sign may be in its flags
        x = x.resolve_neg()
    given = x.shape
    if len(given) == 2:
        launch = launches_of(weight).get((given, x.dtype, dtype, None))
        if launch is not None:
            y = torch.empty(given[0], weight.shape[1], dtype=dtype, device=x.device)
            _run(launch, x, y)
            return y
    (k, n), batch = weight.shape[-2:], weight.shape[:-2]
    if not batch:
        rows = x if x.ndim == 2 else x.reshape(-1, k)
    elif x.ndim > 1 and torch.broadcast_shapes(x.shape[:-2], batch) == batch:
        rows = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
    else:
        return products.matmul(x, weight, dtype)
    *products_of, m, _ = rows.shape
    y = torch.empty((*products_of, m, n), dtype=dtype, device=x.device)
    planes = PLANES[x.dtype]
    if k == 0:
        y.zero_()
    elif y.numel():
        step = planning.TOGETHER // planes if planes > 1 else m
        if m <= step:
            multiply(rows, weight, y, None)
        elif batch:
            return products.matmul(x, weight, dtype)
        else:
            for start in range(0, m, step):
                part = slice(start, start + step)
                multiply(rows[part], weight, y[part], None)
    if rows is x:
        return y
    return y.reshape(*(batch if batch else x.shape[:-2]), *x.shape[-2:-1], n)


def matmul_bf16(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, the values of ``a`` as rows of bfloat16."""
    return matmul(decode.dequantize(a, torch.bfloat16), b, dtype)


def matmul_f32(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, the values of ``a`` as rows of float32."""
    return matmul(decode.dequantize(a, torch.float32), b, dtype)


def multiply(x: torch.Tensor, weight: QTensor, y: torch.Tensor, tiles: Tiles | None) -> None:
    """``y = x @ weight``, x (batch, m, k) or (m, k), by the given tiles or the table's."""
    if x.dtype is not torch.float32 or weight.table is None:
        _multiply(x, weight, y, tiles)
        return
    # Entries of float32 enter as three of bf16 that add up to them, a product for each.
    parts = [torch.empty(y.shape, dtype=torch.float32, device=y.device) for _ in range(3)]
    for part, table in zip(parts, split_planes(weight.table[None]).float(), strict=True):
        _multiply(x, weight._replace(table=table), part, tiles)
    torch.add(parts[2] + parts[1], parts[0], out=parts[0])
    y.copy_(parts[0])


def _multiply(x: torch.Tensor, weight: QTensor, y: torch.Tensor, tiles: Tiles | None) -> None:
    key = (x.shape, x.dtype, y.dtype, tiles)
    known = launches_of(weight)
    launch = known.get(key)
    if launch is None:
        *batches, m, _ = x.shape
        batch, place = batches[0] if batches else 1, (x.dtype, y.dtype, x.device.index or 0)
        launch = _launch_of(weight, batch, m, place, tiles)
        keep(known, key, launch)
    _run(launch, x, y)


def _run(launch: _Launch, x: torch.Tensor, y: torch.Tensor) -> None:
    is_wide = launch.tiles.wide > 0
    if launch.planes > 1:
        x = split_planes(x.reshape(-1, x.shape[-1]))
    else:
        x = _aligned(x, is_wide=is_wide)
    argument = Operands.from_buffer_copy(launch.argument)
    argument.x, argument.y = x.data_ptr(), y.data_ptr()
    given = _tiled(argument, x, launch.plan) if is_wide else argument
    # A kernel copies codes and numbers of its weight before the kernel before it has ended. So that
    # this is not the one that writes them, a weight's first product on each stream waits.
    nvrtc.launch(launch.function, launch.plan.grid, given, waited=launch.waited)


class _Launch(NamedTuple):
    """What is known of a product before ``x`` and ``y`` are: the argument without them, and the
    arrays that it points into. ``of_weight``: these are the weight's own, so it may be kept.
    ``waited``: see ``nvrtc.launch``."""

    plan: Plan
    function: nvrtc.Function
    argument: Operands
    tiles: Tiles
    planes: int
    arrays: tuple[torch.Tensor | None, ...]
    of_weight: bool
    waited: set[int]


#: Launches that a weight keeps.
_MOST_LAUNCHES = 64


def launches_of(weight: QTensor) -> dict[Any, Any]:
    """Those that were made of a weight."""
    found = weight._prepared
    if found is None:
        found = {}
        object.__setattr__(weight, "_prepared", found)
    return cast("dict[Any, Any]", found)


def keep(known: dict[Any, Any], key: Any, launch: Any) -> None:
    """Keep a launch among those of its weight, if it points into nothing else."""
    if launch.of_weight:
        if len(known) >= _MOST_LAUNCHES:
            known.clear()
        known[key] = launch


def _launch_of(
    weight: QTensor,
    batch: int,
    m: int,
    place: tuple[torch.dtype, torch.dtype, int],
    tiles: Tiles | None,
) -> _Launch:
    """A launch for ``batch`` times ``m`` rows; ``place``: dtypes of x and y, and the device."""
    scheme, (k, n), by_n = weight.scheme, weight.shape[-2:], weight.axes[-1] == weight.ndim - 1
    entering, out = (str(dtype).removeprefix("torch.") for dtype in place[:2])
    gpu = nvrtc.gpu_of(place[2])
    tiles = planning.tiles_for(scheme, (m, n, k), entering, gpu, tiles, by_n=by_n)
    planes = planning.PLANES[entering]
    codes = weight.data
    in_lines = codes.is_contiguous() or (codes.ndim == 2 and codes.stride(1) == 1)
    if codes.data_ptr() % 4 or not in_lines:
        codes = codes.clone(memory_format=torch.contiguous_format)
    scales, of_scales = _grid(weight.scales, scheme.scale, batch)
    of_codes = Lines(0, codes.stride(-2), codes.stride(-2) * codes.shape[-2] if batch > 1 else 0)
    offsets, of_offsets = None, Lines(0, 0, 0)
    if scheme.offset is not None:
        offsets, of_offsets = _grid(weight.offsets, scheme.offset.dtype, batch)
    # What lies past a line's end is no zero, and may be NaN.
    line = line_size_bytes(weight.stored_shape[-1], scheme.bits, scheme.store)
    steps = (
        step_of(codes.data_ptr() | codes.stride(-2) | line),
        _step_of_grid(scales, of_scales),
        1 if offsets is None else _step_of_grid(offsets, of_offsets),
    )
    shapes = Shapes(weight.stored_shape, by_n, batch, m * planes)
    grids = Grids(of_scales.kind, of_offsets.kind, steps)
    plan = planning.plan(scheme, shapes, (entering, out), grids, tiles, gpu)
    arrays = (codes, scales, offsets, weight.tensor_scale, weight.table)
    pointers = [0 if array is None else array.data_ptr() for array in arrays]
    lines = (of_codes, of_scales, of_offsets)
    argument = planning.argument_of(plan, shapes, pointers, lines)
    own = (weight.data, weight.scales, weight.offsets)
    of_weight = all(mine is its for mine, its in zip(arrays[:3], own, strict=True))
    function = nvrtc.load(
        plan.code.sources,
        "matmul",
        plan.code.options,
        plan.threads,
        plan.shared_bytes,
        place[2],
        plan.code.before,
    )
    return _Launch(plan, function, argument, tiles, planes, arrays, of_weight, set())


def _aligned(x: torch.Tensor, *, is_wide: bool) -> torch.Tensor:
    """Lines of whole 16 bytes at addresses of whole 16 bytes: mostly ``x`` itself.

    wgmma.cu (``is_wide``) copies tiles of any lines, the others want them one after the other.
    """
    missing = -x.shape[-1] % 8
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    if x.data_ptr() % 16 == 0 and (x.is_contiguous() or (is_wide and _is_in_lines(x))):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _is_in_lines(x: torch.Tensor) -> bool:
    """Whether elements of a line are neighbours, and lines whole 16 bytes apart."""
    *steps, last = x.stride()
    return last == 1 and all(step > 0 and step % 8 == 0 for step in steps)


def _tiled(operands: Operands, x: torch.Tensor, plan: Plan) -> Tiled | Doubly:
    """The argument of wgmma.cu's kernel, or of bytes.cu's, for ``x`` (batch, m, k)."""
    *batch, m, k = x.shape
    steps = (m * k, k) if x.is_contiguous() else (m * k, *x.stride())[-3:-1]
    extents = (batch[0] if batch else 1, m, k)
    tiles = nvrtc.tiles_of_array(x.data_ptr(), extents, steps, plan.map_rows)
    if not plan.map_lines:
        return Tiled(tiles, operands, *plan.blocks)
    extents, step = (1, operands.n, operands.code_line // 2), operands.code_stride // 2
    codes = nvrtc.tiles_of_array(operands.codes, extents, (operands.n * step, step), plan.map_lines)
    return Doubly(tiles, codes, operands, *plan.blocks)


def _grid(numbers: Any, kind: Any, batch: int) -> tuple[torch.Tensor, Lines]:
    """Scales or offsets as the kernel reads them; quantized ones are decoded first."""
    if isinstance(numbers, QTensor):
        numbers = decode.dequantize(numbers, None)
    array = numbers.contiguous()
    return array, planning.lines_of(type_number(kind), array.shape, batch)


def _step_of_grid(array: torch.Tensor, lines: Lines) -> int:
    return step_of(array.data_ptr() | lines.stride | lines.batch)
