"""The compiled part as XLA's FFI sees it: the binary interface, real calls, and nonsense."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_xla import GOOD, Buffer, Buffers, Caller, Frame, P, Version, handler
from polyquant.backends.native.compiled import compiled

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMPILER = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)

# -- the binary interface ---------------------------------------------------------------------

#: Ours, XLA's, and (our member, XLA's).
STRUCTURES = (
    ("Version", "XLA_FFI_Api_Version", (("extensions", "extension_start"),
        ("major", "major_version"), ("minor", "minor_version"))),
    ("ErrorArgs", "XLA_FFI_Error_Create_Args", (("message", "message"), ("code", "errc"))),
    ("StreamArgs", "XLA_FFI_Stream_Get_Args", (("context", "ctx"), ("stream", "stream"))),
    ("Buffer", "XLA_FFI_Buffer", (("dtype", "dtype"), ("data", "data"), ("rank", "rank"),
        ("dims", "dims"))),
    ("Text", "XLA_FFI_ByteSpan", (("data", "ptr"), ("size", "len"))),
    ("Array", "XLA_FFI_Array", (("dtype", "dtype"), ("size", "size"), ("data", "data"))),
    ("Buffers", "XLA_FFI_Args", (("count", "size"), ("types", "types"), ("each", "args"))),
    ("Buffers", "XLA_FFI_Rets", (("count", "size"), ("types", "types"), ("each", "rets"))),
    ("Attributes", "XLA_FFI_Attrs", (("count", "size"), ("types", "types"), ("names", "names"),
        ("each", "attrs"))),
    ("Frame", "XLA_FFI_CallFrame", (("extensions", "extension_start"), ("api", "api"),
        ("context", "ctx"), ("stage", "stage"), ("operands", "args"), ("results", "rets"),
        ("attributes", "attrs"), ("future", "future"))),
)  # fmt: skip
#: Those of which ours is the beginning, or whose members are compared alone.
BEGINNINGS = (
    ("Api", "XLA_FFI_Api", (("version", "api_version"), ("internal", "internal_api"),
        ("create_error", "XLA_FFI_Error_Create"), ("get_stream", "XLA_FFI_Stream_Get"))),
    ("Metadata", "XLA_FFI_Metadata", (("version", "api_version"), ("traits", "traits"))),
    ("MetadataRequest", "XLA_FFI_Metadata_Extension", (("metadata", "metadata"),)),
)  # fmt: skip
NUMBERS = (
    ("kMajor", "XLA_FFI_API_MAJOR"),
    ("kMetadata", "XLA_FFI_Extension_Metadata"),
    ("kInvalidArgument", "XLA_FFI_Error_Code_INVALID_ARGUMENT"),
    ("kNotFound", "XLA_FFI_Error_Code_NOT_FOUND"),
    ("kFailedPrecondition", "XLA_FFI_Error_Code_FAILED_PRECONDITION"),
    ("kInternal", "XLA_FFI_Error_Code_INTERNAL"),
    *((f"k{kind}", f"XLA_FFI_DataType_{kind}") for kind in ("U8", "S64", "F16", "F32", "BF16")),
    ("kBuffer", "XLA_FFI_ArgType_BUFFER"),
    ("kBuffer", "XLA_FFI_RetType_BUFFER"),
    ("kArray", "XLA_FFI_AttrType_ARRAY"),
    ("kText", "XLA_FFI_AttrType_STRING"),
    ("kInitialize", "XLA_FFI_ExecutionStage_INITIALIZE"),
    ("kExecute", "XLA_FFI_ExecutionStage_EXECUTE"),
    ("kCommandBufferCompatible", "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE"),
)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_the_declarations_agree_with_those_of_jaxlib(tmp_path: Path) -> None:
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"', "namespace x = pq::xla;"]
    for is_whole, rows in ((True, STRUCTURES), (False, BEGINNINGS)):
        for ours, theirs, members in rows:
            if is_whole:
                lines.append(f'static_assert(sizeof(x::{ours}) == sizeof({theirs}), "{ours}");')
            lines += [
                f"static_assert(offsetof(x::{ours}, {mine}) == offsetof({theirs}, {its}) && "
                f"sizeof(x::{ours}::{mine}) == sizeof({theirs}::{its}), "
                f'"{ours}::{mine}");'
                for mine, its in members
                if (mine, its) != ("version", "version")
            ]
    lines += [f'static_assert(x::{mine} == {its}, "{mine}");' for mine, its in NUMBERS]
    # The first member of an extension, and its size, whatever newer headers call it.
    lines.append("using Base = decltype(XLA_FFI_Metadata_Extension::extension_base);")
    lines.append("static_assert(sizeof(x::Extension) == sizeof(Base) && ")
    lines.append('offsetof(x::Extension, type) == offsetof(Base, type), "Extension");')
    source = tmp_path / "agree.cpp"
    source.write_text("\n".join(lines) + "\n")
    include = [f"-I{jax.ffi.include_dir()}", f"-I{NATIVE}"]
    command = [str(COMPILER), "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", *include]
    made = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert not made.returncode, made.stderr[:2000]


# -- called by XLA ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call() -> Any:
    """A call on the CPU, where XLA hands over no CUDA stream."""
    target = "polyquant_cuda_launch_on_the_cpu"
    jax.ffi.register_ffi_target(target, compiled().cuda_launch(), platform="cpu")

    def run(**attributes: Any) -> str:
        with jax.default_device(jax.devices("cpu")[0]), pytest.raises(Exception) as raised:
            out = jax.ShapeDtypeStruct((4,), jnp.float32)
            jax.block_until_ready(jax.ffi.ffi_call(target, out)(jnp.ones(4), **attributes))
        return str(raised.value)

    return run


def test_attributes_are_read_before_the_stream_is_asked_for(call: Any) -> None:
    assert "GPU context is not available" in call(**GOOD)


WRONG = (
    ({"kernel": 3}, "takes kernel, launch"),
    ({"launch": np.zeros(8, np.int32)}, "takes kernel, launch"),
    ({"launch": np.ones(7, np.int64)}, "wrong number of numbers"),
    ({"launch": np.array([1, 1, 0, 1, 1, 1, 32, 0])}, "out of range"),
    ({"launch": np.array([1, 1, 1, 1, 1, 1, 32, -1])}, "out of range"),
    ({"launch": np.array([1 << 40, 1, 1, 1, 1, 1, 32, 0])}, "out of range"),
    ({"argument": np.zeros(0, np.int64)}, "wrong number of numbers"),
    ({"argument": np.zeros(1000, np.int64)}, "wrong number of numbers"),
    ({"places": np.zeros(3, np.int64)}, "wrong number of numbers"),
    ({"maps": np.zeros(3, np.int64)}, "wrong number of numbers"),
    ({"maps": np.zeros(24, np.int64)}, "wrong number of numbers"),
)


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_attributes_that_are_wrong_are_refused(
    call: Any, given: dict[str, Any], message: str
) -> None:
    assert message in call(**{**GOOD, **given})


# -- called with nonsense ---------------------------------------------------------------------


def test_nonsense_is_refused_in_a_sentence() -> None:
    """Without a driver no launch is tried; what stands before it reads only what it may."""
    chance, run = random.Random(7), handler()
    for trial in range(400):
        caller = Caller()
        given = dict(GOOD)
        for name in ("launch", "argument", "places", "maps"):
            if chance.random() < 0.3:
                numbers = [chance.choice((-1, 0, 1, 8, 128, 2**40, -(2**63))) for _ in range(17)]
                given[name] = np.array(numbers[: chance.randrange(18)], np.int64)
        if chance.random() < 0.1:
            del given[chance.choice(sorted(given))]
        frame = Frame(ctypes.sizeof(Frame), None, ctypes.addressof(caller.api), None)
        frame.stage = chance.choice((2, 3, 3, 3, 77))
        frame.operands = caller.buffers(chance, chance.randrange(4))
        frame.results = caller.buffers(chance, chance.randrange(3))
        frame.attributes = caller.attributes(chance, given)
        assert run(ctypes.addressof(frame)) == 1, trial
        (message,) = caller.said
        assert message.endswith("."), message


def test_another_version_is_refused_and_nothing_crashes_without_one() -> None:
    run, caller = handler(), Caller()
    frame = Frame(ctypes.sizeof(Frame), None, ctypes.addressof(caller.api), None, 3)
    caller.api.version.major = 1
    assert run(ctypes.addressof(frame)) == 1
    frame.size = 8
    caller.api.version.major = 0
    assert run(ctypes.addressof(frame)) == 2
    assert all("version of its FFI" in message for message in caller.said)
    frame.api = None
    assert not run(ctypes.addressof(frame))
    assert not run(None)


def test_it_says_that_command_buffers_may_hold_it() -> None:
    class Metadata(ctypes.Structure):
        _fields_ = (("size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32))

    class Request(ctypes.Structure):
        _fields_ = (("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", P), ("asked", P))

    asked = Metadata(ctypes.sizeof(Metadata), Version(24, None, 9, 9), 0)
    request = Request(ctypes.sizeof(Request), 1, None, ctypes.addressof(asked))
    frame = Frame(ctypes.sizeof(Frame), ctypes.addressof(request), None)
    assert not handler()(ctypes.addressof(frame))
    assert (asked.version.major, asked.version.minor, asked.traits) == (0, 3, 1)


# -- the product of the CPU -------------------------------------------------------------------

#: x (1, 2, 32) by a weight (3, 32) of int4 in one block a line; its codes, table and scales.
PRODUCT = (1, 2, 3, 32, 2, 1, 32, 4, 4, 0, 1, 0, *(0,) * 6, 1, 2, -1, 0, 3)


class Calm(random.Random):
    """Nothing unlikely happens."""

    def random(self) -> float:
        return 0.5


def multiplied(facts: Any, *, m: int = 2, n: int = 3, dtype: int = 11) -> tuple[Any, str | None]:
    """What the handler makes of a product of ones, and what it says."""
    caller = Caller()
    arrays = (np.ones((1, m, 32), np.float32), np.full((3, 16), 0x11, np.uint8),
              np.arange(16, dtype=np.float32), np.full(3, 2, np.float32))  # fmt: skip
    out = np.zeros((1, m, n), np.float32)
    extents = [(ctypes.c_int64 * 3)(*array.shape) for array in (*arrays, out)]
    every = [
        Buffer(48, None, kind, array.ctypes.data, array.ndim, ctypes.addressof(shape))
        for array, kind, shape in zip((*arrays, out), (dtype, 6, 11, 11, 11), extents, strict=True)
    ]
    places = (P * 5)(*map(ctypes.addressof, every))
    types = (ctypes.c_int * 5)(*(1,) * 5)
    given = np.array(facts, np.int64)
    attributes = caller.attributes(Calm(), {"facts": given})
    frame = Frame(ctypes.sizeof(Frame), None, ctypes.addressof(caller.api), None, 3)
    frame.operands = Buffers(40, None, 4, ctypes.addressof(types), ctypes.addressof(places))
    last = ctypes.addressof(places) + 4 * ctypes.sizeof(P)
    frame.results = Buffers(40, None, 1, ctypes.addressof(types), last)
    frame.attributes = attributes
    failed = handler("xla_product")(ctypes.addressof(frame))
    return out, caller.said[0] if failed else None


def test_a_product_is_what_its_facts_say() -> None:
    out, said = multiplied(PRODUCT)
    assert said is None
    assert (out == 64).all()


WRONG_PRODUCTS = (
    ({0: 0}, "do not fit the weight"),
    ({1: 9}, "no such length|1 to 8 axes|end too early|out of range|block"),
    ({2: 4}, "does not fit"),
    ({3: 64}, "a block|does not fit|too few"),
    ({6: 64}, "a block is empty, or longer"),
    ({7: 0}, "bits run from 1 to 8"),
    ({9: 4}, "unknown kind"),
    ({9: 2}, "no such store"),
    ({18: 9}, "no such buffer"),
    ({18: 4}, "too few bytes"),
    ({18: 3}, "too few bytes"),
    ({19: -1}, "no such buffer"),
    ({19: 4}, "are operands"),
    ({20: 0}, "does not fit"),
    ({21: 7}, "unknown scale type"),
    ({21: 1}, "does not fit"),
    ({22: 2}, "does not fit"),
    ({11: 3}, "unknown kind"),
    ({11: 1}, "end too early"),
    ({21: 6, 22: 1}, "end too early|out of range|1 to 8 axes"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG_PRODUCTS)
def test_products_that_fit_nothing_are_refused(changes: dict[int, int], message: str) -> None:
    facts = list(PRODUCT)
    for place, value in changes.items():
        facts[place] = value
    out, said = multiplied(facts)
    assert said is not None and re.search(message, said), said
    assert said.startswith("The product's custom call is refused: ")
    assert not out.any()


def test_products_of_other_extents_and_facts_are_refused() -> None:
    for facts, given in (
        (PRODUCT, {"n": 4}),
        (PRODUCT, {"dtype": 5}),
        (PRODUCT[:-1], {}),
        ((*PRODUCT, 0), {}),
        ((), {}),
    ):
        _, said = multiplied(facts, **given)
        assert said is not None


def test_facts_that_are_nonsense_never_crash() -> None:
    chance = random.Random(3)
    fine = 0
    for _ in range(3000):
        facts = list(PRODUCT)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(facts))
            facts[place] = chance.choice((-1, 0, 1, 2, 3, 5, 6, 8, 16, 31, 2**31, 2**62, -(2**63)))
        fine += multiplied(facts[: chance.choice((len(facts), len(facts), 9))])[1] is None
    assert fine < 1500


# -- what the driver is asked -----------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the loader finds libcuda.so.1 on Linux")
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_what_the_driver_is_asked(tmp_path: Path) -> None:
    library = str(tmp_path / "libcuda.so.1")
    flags = ("-std=c++17", "-shared", "-fPIC", "-o", library, str(HERE / "fake_driver.cpp"))
    subprocess.run([str(COMPILER), *flags], check=True)
    paths = os.pathsep.join((str(HERE.parent), *filter(None, sys.path)))
    known = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "under_fake_driver.py")]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    said, loaded = found["unknown"]
    assert "not known in this process" in said and not loaded
    assert found["ready"] == [None, 1, 1, 4096, 0]  # loaded and prepared before it is launched
    assert found["launched"] == [[5, 6, 8, 256, 1, 1, 4096], 77, 1, [1, 1, 8], 0]
    assert found["argument"] == [64, 7, 32, 9]
    assert found["mapped"] == [9, 3, 3, 48, [320, 30, 2], [640, 19200], [64, 24, 1]]
    assert found["in_place"] == [0x5A, 9]
    assert found["twice"] == [32, [64, 9, 1], [64, 16, 1], 0x5A, 0x5A, [64, 9]]
    assert found["single"] == [0, 4]
    assert found["huge"] == [1, [1 << 30] * 3]
    assert (
        found["refused"] == "cuLaunchKernelEx of the CUDA driver answered CUDA_ERROR_OUT_OF_MEMORY."
    )
    assert "another size" in found["size"]
    assert "CUDA_ERROR_INVALID_VALUE" in found["broken"]
