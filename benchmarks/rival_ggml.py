"""ggml's products as rivals: its compiled libraries out of Python packages, called through ctypes.

``libggml-python`` carries ggml itself, and ``ik-llama-cpp-python`` the fork ik_llama.cpp; neither
is compiled when it is installed. Both are built for AVX2. On a machine with more, PQ_BENCH_GGML may
name a folder with libggml-base.so and libggml-cpu.so that were built for it, which then stand for
ggml:

    pip download --no-deps --no-binary :all: libggml-python && tar xf libggml_python-*.tar.gz
    cmake -S libggml_python-*/ggml -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON
    cmake --build build --target ggml-cpu        # PQ_BENCH_GGML=build/src

A product is a graph of one node that ``ggml_graph_compute`` runs, which also quantizes the
activations: to blocks of 32 (q8_0) or 256 (q8_K) integers of 8 bits. Only ROWS rows of a weight are
quantized and then repeated, since some of ggml's searches take minutes for a whole one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from weights import Array, Missing, Prepared, aligned

#: Number of a type in ggml.h.
TYPES: Mapping[str, int] = MappingProxyType(
    {
        "Q4_0": 2,
        "Q8_0": 8,
        "Q2_K": 10,
        "Q3_K": 11,
        "Q4_K": 12,
        "Q5_K": 13,
        "Q6_K": 14,
        "IQ4_NL": 20,
        "MXFP4": 39,
        "NVFP4": 40,
    }
)
ROWS = 256
_F32 = 0
#: Bytes for the description of a tensor and of a graph that multiplies by it, and some to spare.
_DESCRIBED = 8192
_POINTER = ctypes.c_void_p


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)
_SILENT = _LOG(lambda level, text, data: None)  # it would tell of every weight that it repacks


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", _POINTER),
        ("no_alloc", ctypes.c_bool),
    )


def _tensor_type(before: Sequence[tuple[str, Any]], between: Sequence[tuple[str, Any]]) -> Any:
    """struct ggml_tensor, which the fork has with two fields more."""
    fields = (
        ("type", ctypes.c_int),
        *before,
        ("buffer", _POINTER),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        *between,
        ("src", _POINTER * 10),
        ("view_src", _POINTER),
        ("view_offs", ctypes.c_size_t),
        ("data", _POINTER),
        ("name", ctypes.c_char * 64),
        ("extra", _POINTER),
    )
    return type("Tensor", (ctypes.Structure,), {"_fields_": fields})


def _plan_type(middle: Sequence[tuple[str, Any]], last: Sequence[tuple[str, Any]]) -> Any:
    """struct ggml_cplan."""
    fields = (
        ("work_size", ctypes.c_size_t),
        ("work_data", _POINTER),
        ("n_threads", ctypes.c_int),
        *middle,
        ("abort_callback", _POINTER),
        ("abort_callback_data", _POINTER),
        *last,
    )
    return type("Plan", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class Ggml:
    """One build of ggml: its functions, its structs, and how it repacks a weight."""

    name: str
    base: ctypes.CDLL
    cpu: ctypes.CDLL
    tensor: Any
    plan: Any
    is_fork: bool

    def context(self, size: int) -> int:
        """A context for descriptions of tensors; their data lie elsewhere."""
        made: int = self.base.ggml_init(_InitParams(size, None, True))
        return made

    def at(self, address: int) -> Any:
        """The struct of a tensor."""
        return self.tensor.from_address(address)


class _Entered(NamedTuple):
    """Activations as a graph for each copy of a weight."""

    graphs: tuple[int, ...]
    plans: tuple[Any, ...]
    out: Array
    kept: tuple[Any, ...]


@cache
def load(name: str) -> Ggml:
    """ggml ("ggml") or its fork ("ik"). Raises Missing."""
    if name == "ik":
        base = cpu = _open(_folder("ik_llama_cpp", "ik-llama-cpp-python") / "lib" / "libggml.so")
        tensor = _tensor_type([("backend", ctypes.c_int)], [("grad", _POINTER)])
        plan = _plan_type([], [])
    else:
        given = os.environ.get("PQ_BENCH_GGML")
        folder = Path(given) if given else _folder("libggml", "libggml-python") / "lib64"
        base, cpu = _open(folder / "libggml-base.so"), _open(folder / "libggml-cpu.so")
        tensor, plan = (
            _tensor_type([], []),
            _plan_type([("threadpool", _POINTER)], [("use_ref", ctypes.c_bool)]),
        )
    _declare(base, cpu, plan, is_fork=name == "ik")
    if name != "ik":
        base.ggml_log_set(_SILENT, None)
        cpu.ggml_cpu_init()
    return Ggml(name, base, cpu, tensor, plan, name == "ik")


def instructions(ggml: Ggml) -> str:
    """The instruction sets that a build uses."""
    names = ("avx2", "fma", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "neon", "dotprod")
    asked = ((name, getattr(ggml.cpu, f"ggml_cpu_has_{name}", None)) for name in names)
    return " ".join(name for name, has in asked if has is not None and has())


def _folder(package: str, distribution: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Missing(f"pip install --no-deps {distribution}")
    return Path(found.submodule_search_locations[0])


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Missing(f"it does not load: {error}") from error


def _declare(base: ctypes.CDLL, cpu: ctypes.CDLL, plan: Any, *, is_fork: bool) -> None:
    """The types of the functions that are called."""
    integer, size, number = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
    pool = () if is_fork else (_POINTER,)
    declared: dict[str, tuple[ctypes.CDLL, Any, tuple[Any, ...]]] = {
        "ggml_init": (base, _POINTER, (_InitParams,)),
        "ggml_free": (base, None, (_POINTER,)),
        "ggml_new_tensor_2d": (base, _POINTER, (_POINTER, number, integer, integer)),
        "ggml_mul_mat": (base, _POINTER, (_POINTER, _POINTER, _POINTER)),
        "ggml_new_graph_custom": (base, _POINTER, (_POINTER, size, ctypes.c_bool)),
        "ggml_build_forward_expand": (base, None, (_POINTER, _POINTER)),
        "ggml_row_size": (base, size, (number, integer)),
        "ggml_quantize_chunk": (
            base,
            size,
            (number, _POINTER, _POINTER, integer, integer, integer, _POINTER),
        ),
        "ggml_graph_plan": (cpu, plan, (_POINTER, number, *pool)),
        "ggml_graph_compute": (cpu, number, (_POINTER, ctypes.POINTER(plan))),
    }
    if is_fork:
        declared["iqk_repack_tensor"] = (base, None, (_POINTER,))
    else:
        declared |= {
            "ggml_log_set": (base, None, (_LOG, _POINTER)),
            "ggml_cpu_init": (cpu, None, ()),
            "ggml_threadpool_params_init": (base, None, (_POINTER, number)),
            "ggml_threadpool_new": (cpu, _POINTER, (_POINTER,)),
            _REPACK: (cpu, _POINTER, ()),
            "ggml_backend_alloc_ctx_tensors_from_buft": (base, _POINTER, (_POINTER, _POINTER)),
            "ggml_backend_tensor_set": (base, None, (_POINTER, _POINTER, size, size)),
        }
    for name, (library, result, arguments) in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


#: ggml_backend_cpu_repack_buffer_type(), which is a function of C++.
_REPACK = "_Z35ggml_backend_cpu_repack_buffer_typev"


@cache
def _threadpool(ggml: Ggml, threads: int) -> int:
    params = ctypes.create_string_buffer(4096)  # struct ggml_threadpool_params is 528 bytes
    ggml.base.ggml_threadpool_params_init(params, threads)
    made: int = ggml.cpu.ggml_threadpool_new(params)
    return made


# -- weights ----------------------------------------------------------------------------------


def prepare(
    library: str, kind: str, weight: Array, copies: int, threads: int, *, repacked: bool
) -> Prepared:
    """Copies of a weight (out, in) in one of ggml's types. Raises Missing."""
    ggml = load(library)
    if ggml.is_fork and kind == "NVFP4":
        raise Missing("it has no such type")
    codes = quantized(ggml, kind, weight[:ROWS])
    values = _decoded(kind, codes, weight.shape[1])
    whole = np.concatenate([codes] * -(-len(weight) // len(codes)))[: len(weight)]
    values = np.concatenate([values] * -(-len(weight) // len(values)))[: len(weight)]
    context = ggml.context(copies * _DESCRIBED)
    n, k = weight.shape
    tensors = [ggml.base.ggml_new_tensor_2d(context, TYPES[kind], k, n) or 0 for _ in range(copies)]
    place = _place_repacked if repacked else _place
    kept = place(ggml, context, tensors, whole)
    entering = _Entering(ggml, tuple(tensors), (n, k), threads)
    return Prepared(
        f"{library} {kind}{' repacked' if repacked else ''}",
        whole.nbytes,
        copies,
        entering,
        _product(ggml),
        values,
        kept=(kept, context),
        takes="8 bits",
    )


def quantized(ggml: Ggml, kind: str, weight: Array) -> Array:
    """Rows of a weight as ggml's bytes, (rows, bytes)."""
    rows, k = weight.shape
    out = np.zeros((rows, ggml.base.ggml_row_size(TYPES[kind], k)), np.uint8)
    source = np.ascontiguousarray(weight, np.float32)
    where = source.ctypes.data, out.ctypes.data
    written = ggml.base.ggml_quantize_chunk(TYPES[kind], *where, 0, rows, k, None)
    if written != out.nbytes:
        raise Missing(f"{ggml.name} does not quantize to {kind}")
    return out


def _decoded(kind: str, codes: Array, k: int) -> Array:
    """What the bytes stand for, by the package gguf: so not by the code that multiplies."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise Missing("its results are checked with gguf: pip install gguf") from error
    found: Array = dequantize(codes, GGMLQuantizationType[kind]).reshape(len(codes), k)
    return found


def _place(ggml: Ggml, context: int, tensors: Sequence[int], codes: Array) -> Any:
    kept = []
    for tensor in tensors:
        memory = aligned(codes)
        ggml.at(tensor).data = memory.ctypes.data
        kept.append(memory)
    return kept


def _place_repacked(ggml: Ggml, context: int, tensors: Sequence[int], codes: Array) -> Any:
    """Weights in the order that a build likes best. Raises Missing where it has none."""
    if ggml.is_fork:
        kept = _place(ggml, context, tensors, codes)
        before = ggml.at(tensors[0]).type
        for tensor in tensors:
            ggml.base.iqk_repack_tensor(tensor)
        if ggml.at(tensors[0]).type == before:
            raise Missing("it has no repacked form of this type")
        return kept
    buffer_type = getattr(ggml.cpu, _REPACK)()
    buffer = ggml.base.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    if not all(ggml.at(tensor).extra for tensor in tensors):
        raise Missing("it has no repacked form of this type here")
    for tensor in tensors:
        ggml.base.ggml_backend_tensor_set(tensor, codes.ctypes.data, 0, codes.nbytes)
    return buffer


# -- products ---------------------------------------------------------------------------------


class _Entering(NamedTuple):
    """Makes graphs for activations (m, k): one for each copy of the weight."""

    ggml: Ggml
    tensors: tuple[int, ...]
    extents: tuple[int, int]
    threads: int

    def __call__(self, x: Array) -> _Entered:
        ggml, base, cpu = self.ggml, self.ggml.base, self.ggml.cpu
        n, k = self.extents
        source, out = aligned(x), aligned(np.zeros((len(x), n), np.float32))
        context = ggml.context((len(self.tensors) + 1) * _DESCRIBED)
        entering = base.ggml_new_tensor_2d(context, _F32, k, len(x))
        ggml.at(entering).data = source.ctypes.data
        pool = () if ggml.is_fork else (_threadpool(ggml, self.threads),)
        graphs, plans = [], []
        work = np.empty(0, np.uint8)
        for tensor in self.tensors:
            node = base.ggml_mul_mat(context, tensor, entering)
            ggml.at(node).data = out.ctypes.data
            graph = base.ggml_new_graph_custom(context, 8, False)
            base.ggml_build_forward_expand(graph, node)
            plan = cpu.ggml_graph_plan(graph, self.threads, *pool)
            if plan.work_size > work.nbytes:
                work = aligned(np.zeros(plan.work_size, np.uint8))
            graphs.append(graph)
            plans.append(plan)
        for plan in plans:
            plan.work_data = work.ctypes.data
        kept = (source, work, _Context(ggml, context))
        return _Entered(tuple(graphs), tuple(map(ctypes.byref, plans)), out, (*kept, *plans))


class _Context:
    """Frees a context with the last reference: a build of the fork has room for 64."""

    def __init__(self, ggml: Ggml, address: int) -> None:
        self._free, self._address = ggml.base.ggml_free, address

    def __del__(self) -> None:
        self._free(self._address)


def _product(ggml: Ggml) -> Callable[[int, Any], Array]:
    compute = ggml.cpu.ggml_graph_compute

    def product(copy: int, entered: _Entered) -> Array:
        if compute(entered.graphs[copy], entered.plans[copy]):
            raise RuntimeError(f"{ggml.name} did not compute the product")
        return entered.out

    return product
