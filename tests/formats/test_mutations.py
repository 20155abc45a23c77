"""Damaged files of every format: an error of the catalogue or a tensor, never a crash.

``POLYQUANT_MUTATIONS=20000 pytest tests/formats/test_mutations.py`` tries more of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from layouts import MIXED, SPARSE, int4_file, save_experts, save_sparse
from peers import FOLDERS, fixture, names
from polyquant.errors import PolyquantError
from polyquant.formats import FORMATS, TensorInfo
from polyquant.formats.burnpack import open_writer as open_burnpack

COUNT = int(os.environ.get("POLYQUANT_MUTATIONS", "300"))
#: A process may grow by this much over all mutations of a format: files are of some kilobytes.
GROWTH_LIMIT_BYTES = 512 * 2**20
#: Numbers that headers lie with.
NUMBERS = (0, 1, 2, 7, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
FORMATS_OF_PEERS = sorted(set(FOLDERS.values()))


def sources(format: str) -> list[tuple[Path, Any]]:
    """Files of a format, and their configs."""
    folders = [folder for folder, name in FOLDERS.items() if name == format]
    found = [fixture(name) for name in names(*folders) if name != ""]
    smallest = sorted(found, key=lambda made: made.path.stat().st_size)[:6]
    return [(made.path, None if made.format == "gguf" else made.config) for made in smallest]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with some changed, cut, doubled or put in, most often near the beginning."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        reach = rng.choice((16, 64, 256, 1024, len(made))) if made else 0
        at = rng.randrange(max(1, min(reach, len(made))))
        kind = rng.randrange(6)
        if kind == 0 and made:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and made:
            made[at] = rng.randrange(256)
        elif kind == 2:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) % 256**width
            made[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 3:
            del made[rng.randrange(len(made) + 1) :]
        elif kind == 4:
            made[at:at] = made[at : at + rng.randrange(1, 64)]
        else:
            del made[at : at + rng.randrange(1, 64)]
    return bytes(made)


#: Dtype codes of one width.
SAME_WIDTH = (
    ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"),
    ("U16", "I16", "F16", "BF16"),
    ("U32", "I32", "F32"),
    ("U64", "I64", "F64"),
)


def lying(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is sound, and does not say what the format wants."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", {})
    tensors = [
        [
            name,
            e["dtype"],
            e["shape"],
            data[end + e["data_offsets"][0] : end + e["data_offsets"][1]],
        ]
        for name, e in header.items()
    ]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(tensors)) if tensors else None
        kind = rng.randrange(6)
        if at is None:
            break
        if kind == 0:
            del tensors[at]
        elif kind == 1:
            others = next(codes for codes in SAME_WIDTH if tensors[at][1] in codes)
            tensors[at][1] = rng.choice(others)
        elif kind == 2:
            shape = tensors[at][2]
            tensors[at][2] = rng.choice((shape[::-1], [math.prod(shape)], [1, *shape], [*shape, 1]))
        elif kind == 3 and tensors[at][2]:
            rows = rng.randrange(tensors[at][2][0] + 1)
            size = len(tensors[at][3]) // max(1, tensors[at][2][0]) * rows
            tensors[at][2:] = [[rows, *tensors[at][2][1:]], tensors[at][3][:size]]
        elif kind == 4:
            tensors[at][3] = rng.randbytes(len(tensors[at][3]))
        elif metadata:
            key = rng.choice(sorted(metadata))
            text = metadata[key]
            cut = rng.randrange(len(text) + 1)
            metadata[key] = rng.choice((text[:cut], text.replace("1", "9"), "{}", ""))
    return sealed(tensors, metadata)


def sealed(tensors: list[list[Any]], metadata: dict[str, str]) -> bytes:
    """A safetensors file of these arrays."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(raw for *_, raw in tensors)


def mutated_config(config: Any, rng: random.Random) -> Any:
    """The same JSON with a value changed somewhere."""
    if isinstance(config, dict) and config and rng.random() < 0.9:
        key = rng.choice(sorted(config))
        return config | {key: mutated_config(config[key], rng)}
    if isinstance(config, list) and config and rng.random() < 0.7:
        at = rng.randrange(len(config))
        return [*config[:at], mutated_config(config[at], rng), *config[at + 1 :]]
    return rng.choice((None, 0, 1, 3, -1, 2**31, 2**60, 0.5, "", "x", [], {}, True, config))


def read_all(path: Path, config: Any, format: str | None) -> bool:
    """Open and read everything; whether that went well. Only errors of the catalogue may come."""
    try:
        with pq.open_checkpoint(path, config=config, format=format) as ck:
            for name in ck:
                tensor = ck[name]
                assert tuple(tensor.shape) == ck.info(name).shape
                if isinstance(tensor, pq.QTensor):
                    with np.errstate(all="ignore"):
                        tensor.dequantize()
    except PolyquantError:
        return False
    return True


def check_mutations(files: list[tuple[Path, Any]], format: str, folder: Path) -> None:
    rng = random.Random(f"{format} {COUNT}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good = 0
    originals = [(path, path.read_bytes(), config) for path, config in files]
    for _ in range(COUNT):
        path, data, config = rng.choice(originals)
        target = folder / f"x{path.suffix}"
        kind = rng.random()
        if config is not None and kind < 0.25:
            target.write_bytes(data)
            config = mutated_config(config, rng)
        elif path.suffix == ".safetensors" and kind < 0.75:
            target.write_bytes(lying(data, rng))
        else:
            target.write_bytes(mutated(data, rng))
        named = format if rng.random() < 0.5 else None
        good += read_all(target, config, named)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < GROWTH_LIMIT_BYTES
    assert good < COUNT  # some of them do damage


@pytest.mark.parametrize("format", FORMATS_OF_PEERS)
def test_damaged_files_of_other_tools(format: str, tmp_path: Path) -> None:
    files = sources(format)
    if not files:
        pytest.skip("the files of other tools are not on this machine")
    check_mutations(files, format, tmp_path)


#: Format -> a maker of a file of it, and its config.
BY_HAND: dict[str, tuple[Any, Any]] = {
    "torchao": (int4_file, None),
    "compressed-tensors": (save_sparse, SPARSE),
    "modelopt": (save_experts, MIXED),
}


@pytest.mark.parametrize("format", BY_HAND)
def test_damaged_files_made_by_hand(format: str, tmp_path: Path) -> None:
    make, config = BY_HAND[format]
    make(tmp_path / "source.safetensors")
    check_mutations([(tmp_path / "source.safetensors", config)], format, tmp_path)


def test_damaged_files_of_burn(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    tensors: dict[str, Any] = {
        "q": pq.quantize(x, "q4s/32:f16"),
        "e": pq.quantize(x, "nvfp4"),
        "x": x,
        "b": np.asarray([True, False]),
    }
    plan = [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    source = tmp_path / "source.bpk"
    origin = json.dumps({"param_ids": {"q": 7}, "scalars": {"s": {"Float": 0.5}}})
    with open_burnpack(source, plan, {"a": "text", "burnpack": origin}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    check_mutations([(source, None)], "burnpack", tmp_path)


def test_every_format_is_damaged() -> None:
    tested = {*FORMATS_OF_PEERS, "burnpack"}
    assert set(FORMATS) - tested == {"polyquant", "npz", "safetensors"}  # in test_damage.py
