"""Products of two quantized operands of many rows, by Hopper's wgmma of 8-bit codes.

``wide.cu`` says how, ``backends/nvidia/wide.py`` what is compiled. Here are the addresses, and
launches that a weight keeps; ``pairing.py`` says what is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from polyquant.backends.nvidia.wide import STEP, Cut, Plan, Wide, plan
from polyquant.backends.torch.cuda import nvrtc
from polyquant.backends.torch.cuda.mma import keep, launches_of
from polyquant.backends.torch.cuda.paired import product_by
from polyquant.qtensor import QTensor


def multiply(a: QTensor, b: QTensor, y: torch.Tensor, cut: Cut | None) -> None:
    """``y = a @ b``, cut as given or as ``cut_for`` says."""
    x, scales, place = _lines(a.data), a.scales.contiguous(), (y.dtype, y.device.index or 0)
    key = (a.scheme, a.shape, place, cut)
    known = launches_of(b)
    launch = known.get(key)
    if launch is None:
        launch = _launch_of(a, b, place, cut)
        keep(known, key, launch)
    made, argument = launch.plan, Wide.from_buffer_copy(launch.argument)
    side = "right" if made.is_turned else "left"
    setattr(argument, side, _map_of(x, a.shape[1], STEP, made.boxes[made.is_turned]))
    setattr(argument, f"{side}_scales", scales.data_ptr())
    if a.tensor_scale is not None:
        setattr(argument, f"{side}_whole", a.tensor_scale.data_ptr())
    argument.y = y.data_ptr()
    nvrtc.launch(launch.function, made.grid, argument, waited=launch.waited)


matmul = product_by(multiply)


class _Launch(NamedTuple):
    """What is known of a product before ``a`` and ``y`` are: the argument without them, and the
    arrays that it points into. ``of_weight``: these are the weight's own, so it may be kept.
    ``waited``: see ``nvrtc.launch``."""

    plan: Plan
    function: nvrtc.Function
    argument: Wide
    arrays: tuple[torch.Tensor, ...]
    of_weight: bool
    waited: set[int]


def _launch_of(a: QTensor, b: QTensor, place: tuple[torch.dtype, int], cut: Cut | None) -> _Launch:
    codes, scales = _lines(b.data), b.scales.contiguous()
    dtype, device = str(place[0]).removeprefix("torch."), place[1]
    given = (a.scheme, b.scheme), (*a.shape, b.shape[1]), dtype, nvrtc.gpu_of(device)
    made = plan(*given, cut, has_words=scales.data_ptr() % 4 == 0)
    code, sizes = made.code, (made.threads, made.shared_bytes)
    function = nvrtc.load(code.sources, "matmul", code.options, *sizes, device, code.before)
    line, width = -(-a.shape[1] * made.bits // 8), STEP * made.bits // 8
    side = "left" if made.is_turned else "right"
    argument = Wide(**made.numbers)
    setattr(argument, side, _map_of(codes, line, width, made.boxes[not made.is_turned]))
    setattr(argument, f"{side}_scales", scales.data_ptr())
    if b.tensor_scale is not None:
        setattr(argument, f"{side}_whole", b.tensor_scale.data_ptr())
    of_weight = codes.data_ptr() == b.data.data_ptr() and scales is b.scales
    return _Launch(made, function, argument, (codes, scales), of_weight, set())


def _map_of(codes: torch.Tensor, line: int, width: int, rows: int) -> Any:
    shape, stride = (codes.shape[0], line), codes.stride(0)
    return nvrtc.tiles_of_lines(codes.data_ptr(), shape, stride, (rows, width))


def _lines(codes: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, lines of whole 16 bytes at addresses of whole 16: mostly as they are."""
    codes = codes.view(torch.uint8)
    if codes.stride(1) == 1 and (codes.data_ptr() | codes.stride(0)) % 16 == 0:
        return codes
    missing = -codes.shape[1] % 16
    if missing:
        return torch.nn.functional.pad(codes, (0, missing))
    return codes.clone(memory_format=torch.contiguous_format)
