"""Calls the private compiled module with nonsense: it must raise, never crash. A program.

    python tests/native_nonsense.py SEED CALLS

Every call is a valid one in which some arguments are replaced. What is accepted nevertheless is put
to use. Prints how many calls there were, and how many were refused.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from collections import Counter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from polyquant.backends.native.compiled import compiled

REFUSALS = (ValueError, TypeError, OverflowError, MemoryError)
LINES, LENGTH, BLOCK = 264, 256, 32  # enough to be shared out among threads
module = compiled()


def array(kind: Any, *shape: int) -> Any:
    return np.ones(shape, kind)


def numbers() -> list[Any]:
    powers = [2**power for power in (7, 8, 15, 16, 30, 31, 32, 40, 58, 62, 63, 64, 70)]
    near = [power + step for power in powers for step in (-1, 0)]
    return [*range(-3, 10), *near, *(-power for power in powers), 1.5, float("nan"), float("inf")]


def lists() -> list[Any]:
    extents = [1, 2, 0, -1, BLOCK, LENGTH, LINES, 2**31, 2**40, 2**58, 2**62, 2**63 - 1]
    some = [[random.choice(extents) for _ in range(random.choice((1, 2, 2, 2, 3, 8, 9)))]]
    return [*some, [], [1], [LINES], (LINES, LENGTH), [1.5, 2], [None], [[1, 2]], "12", [10**30]]


def arrays() -> list[Any]:
    kinds = ("u1", "i1", "u2", "f2", "f4", "f8", "i4", "i8", ">f4", ">u2", "?", "c8", "O", "U3")
    kind = random.choice(kinds)
    shapes = [(), (0,), (1,), (LENGTH,), (LINES, 0), (2, 3, 4), (1,) * 9, (3, LENGTH)]
    sides = (LENGTH, LENGTH - 1, LENGTH // 2, LENGTH // BLOCK, LINES)
    shape = random.choice([*shapes, *((LINES, side) for side in sides), (LENGTH, LINES)])
    made, plain = np.zeros(shape, kind), np.zeros(shape, "f4")
    found = [made, plain, plain[..., ::-1] if plain.ndim else plain]
    found += [np.ones(shape, "u1"), made.T, np.asfortranarray(made)]
    found += [np.zeros((2 * LINES, 2 * LENGTH), "f4")[::2, ::2], np.zeros((LINES, LENGTH), "f4")]
    frozen = np.zeros((LINES, LENGTH), "f4")
    frozen.flags.writeable = False
    room = np.zeros(LINES * LENGTH * 4 + 1, "u1")
    return [*found, frozen, room[1:].view("f4"), room[1:].view("f4").reshape(LINES, LENGTH)]


def repeated() -> list[Any]:
    """Arrays that have more elements than there is memory, in one place."""
    one = np.ones((1, LENGTH // 2), "u1")
    shapes = [(2**40, 128), (2**55, 128), (2**58, 16), (2**31, 128), (2**62, 1)]
    return [as_strided(one, shape, (0, 1)) for shape in shapes]


def nonsense(name: str, valid: Any) -> Any:
    """Mostly of the right type, and wrong otherwise."""
    others = [
        None,
        True,
        "x",
        b"",
        object(),
        {},
        matrix(),
        coder(),
        np.float32(1),
        memoryview(b"ab"),
    ]
    if random.random() < 0.2:
        return random.choice(random.choice([numbers, lists, arrays, lambda: others])())
    if isinstance(valid, bool):
        return not valid
    if isinstance(valid, int | float):
        return random.choice(
            [n for n in numbers() if isinstance(n, type(valid)) and abs(n) < 2**31]
        )
    if isinstance(valid, list):
        return random.choice(lists())
    is_stored = name in ("data", "scales", "table", "offsets", "divisor")
    return random.choice(random.choice([arrays, arrays, repeated if is_stored else arrays])())


def matrix_arguments() -> dict[str, Any]:
    kind = random.randrange(4)
    bits = random.choice((1, 2, 3, 4)) if kind == 0 else random.choice((5, 6, 7, 8))
    bits = random.choice((6, 8)) if kind == 2 else bits
    number = random.randrange(6)
    stored = ("f4", "f2", "u2", "u1", "u1", "u1")[number]
    offset_kind = random.choice((0, 0, 1, 2))
    return {
        "data": np.full((LINES, LENGTH * bits // 8), 0x5A, "u1"),
        "shape": [LINES, LENGTH],
        "block": [1, BLOCK],
        "bits": bits,
        "value_bits": bits,
        "kind": kind,
        "is_signed": random.random() < 0.5,
        "minifloat": [
            2 ** (bits - 1),
            2 ** (bits - 1) - 1,
            16 - bits,
            8,
            4096 if bits == 6 else 1,
            0,
        ],
        "table": np.arange(2**bits, dtype="f4"),
        "scales": array(stored, LINES, LENGTH // BLOCK),
        "scale_number": number,
        "tensor_scale": random.choice((None, array("f4"))),
        "offsets": array("u1", LINES, LENGTH // BLOCK) if offset_kind else None,
        "offset_number": 5,
        "offset_kind": offset_kind,
    }


def coder_arguments() -> dict[str, Any]:
    return {
        "code": random.randrange(3),
        "value_bits": 4,
        "store_bits": random.choice((4, 8)),
        "extends_sign": random.random() < 0.5,
        "low": -7.0,
        "high": 6.0,
        "mantissa_bits": 1,
        "bias": 1,
        "midpoints": [float(i) for i in range(15)],
        "codes": list(range(16)),
        "offset_kind": random.randrange(3),
        "rounds_first": random.random() < 0.5,
    }


def geometry() -> dict[str, Any]:
    return {"x": array("f4", LINES, LENGTH), "shape": [LINES, LENGTH], "block": [1, BLOCK]}


def matrix() -> Any:
    return module.Matrix(**matrix_arguments())


def coder() -> Any:
    return module.Coder(**coder_arguments())


def call(made: Any, given: dict[str, Any]) -> Any:
    """``made(**given)`` with up to three arguments replaced."""
    for name in random.sample(sorted(given), min(len(given), random.choice((0, 1, 1, 1, 2, 3)))):
        given[name] = nonsense(name, given[name])
    return made(**given)


def use(weight: Any) -> None:
    """Whatever a matrix takes for its shape: nothing may be read that is not there."""
    for lines, length in ((LINES, LENGTH), (1, 1), (LENGTH, LINES), (0, 0), (LINES, 0), (1, LINES)):
        for out in (array("f4", lines, length), array("f2", lines, length)):
            attempt(weight.decode, out=out, threads=2)
        for m in (1, 3, 20):
            shared = {"first_line": 0, "count": lines, "threads": 2}
            along, across = array("f4", m, length), array("f4", m, lines)
            attempt(weight.matmul, x=along, out=across, along_k=True, **shared)
            attempt(weight.matmul, x=across, out=along, along_k=False, **shared)


def attempt(made: Any, **given: Any) -> Any:
    try:
        return made(**given)
    except REFUSALS:
        return None


def bytes_arguments() -> dict[str, Any]:
    given = {"bits": 4, "mask": 15, "flip": 8, "table": [], "powers": [], "bias": 8}
    return given | {"factor": 1.0, "has_zero_point": random.random() < 0.3}


def one() -> Any:
    threads, scales = {"threads": 2}, array("f4", LINES * LENGTH // BLOCK)
    codes = np.zeros((LINES, random.choice((LENGTH // 2, LENGTH))), "u1")
    which = random.randrange(10)
    if which < 3:
        use(call(module.Matrix, matrix_arguments()))
    elif which == 3:
        m = random.choice((1, 4, 30))
        x, out, along_k = array("f4", m, LENGTH), array("f4", m, LINES), random.random() < 0.5
        given = {"x": x, "out": out} if along_k else {"x": out, "out": x}
        given |= {"along_k": along_k, "first_line": 0, "count": LINES}
        call(matrix().matmul, given | threads)
    elif which == 4:
        call(matrix().decode, {"out": array("f4", LINES, LENGTH)} | threads)
    elif which == 5:
        x, out = matrix(), array("f4", LINES, LINES)
        kind = call(module.Bytes, bytes_arguments())
        call(matrix().matmul_codes, {"x": x, "bytes": kind, "out": out} | threads)
        more = {"x": array("f4", LINES, LENGTH), "block": random.choice((BLOCK, 32, LENGTH))}
        more |= {"range": 7.0, "weight": matrix(), "bytes": kind, "out": out}
        call(module.Coder(**coder_arguments() | {"code": 0}).matmul, more | threads)
    elif which == 6:
        made = call(module.Coder, coder_arguments())
        more = {"out": codes, "divisor": scales, "half": None, "offset": scales}
        call(made.encode, geometry() | more | {"saturates": True} | threads)
    elif which == 7:
        made = call(module.Coder, coder_arguments())
        more = {"out": codes, "scales": scales, "number": 0, "range": 7.0}
        call(made.quantize, geometry() | more | threads)
        made = call(module.Coder, coder_arguments())
        more = {"out": array("f8", scales.size), "numbers": array("f4", 256), "divisor": scales}
        more |= {"half": None, "offset": scales, "saturates": True}
        call(made.block_sums, geometry() | more | threads)
    elif which == 8:
        more = {"low": scales, "high": scales.copy(), "saturates": True}
        call(module.ranges, geometry() | more | threads)
    else:
        call(module.all_finite, {"x": array("f4", LINES, LENGTH)} | threads)
        call(module.set_num_threads, {"count": 2})
        call(module.set_target, {"name": random.choice(module.targets())})


def nest(depth: int) -> None:
    """Scales of scales of scales."""
    given = {"shape": [1, 1], "block": [1, 1], "data": array("u1", 1, 1), "kind": 1}
    given |= {"bits": 8, "value_bits": 8, "scales": array("f4", 1, 1), "scale_number": 0}
    given |= {"offsets": None, "offset_kind": 0, "tensor_scale": None}
    weight = module.Matrix(**matrix_arguments() | given)
    for _ in range(depth):
        weight = module.Matrix(**matrix_arguments() | given | {"scales": weight, "scale_number": 6})
    weight.decode(array("f4", 1, 1), 1)


def main(seed: int, calls: int) -> None:
    faulthandler.enable()
    random.seed(seed)
    refused: Counter[str] = Counter()
    nest(3)
    for made in (lambda: nest(100_000), *[one] * calls):
        try:
            made()
        except REFUSALS as error:
            refused[type(error).__name__] += 1
    sys.stdout.write(f"{calls} calls, {sum(refused.values())} refused: {dict(refused)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
