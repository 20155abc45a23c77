"""Every error of polyquant: one class each, with a stable slug and a text that takes facts.

A class is data. It is raised with facts as keywords, exactly those that its ``message`` names::

    raise BlockRank(block="16x16", block_rank=2, shape=(8,), rank=1)

The full record of each error (what it means, how to mend it, code before and after) lies in
``errors.toml`` beside this file; ``record(slug)`` reads it and ``polyquant explain`` prints it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from string import Formatter
from types import MappingProxyType
from typing import Any, ClassVar

#: Characters of a fact's repr in a message: enough for a scheme, a path or a short list.
_LONGEST_REPR = 200


class _Text(Formatter):
    """Fills a message; a repr (``{got!r}``) that would fill a screen is cut in the middle."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion != "r":
            return super().convert_field(value, conversion)
        shown = repr(value)
        if len(shown) <= _LONGEST_REPR:
            return shown
        half = _LONGEST_REPR // 2
        return " ".join(f"{shown[:half]} ... {shown[-half:]}".split())


_TEXT = _Text()


class DeadBlocksWarning(UserWarning):
    """Blocks whose values are too small for the scheme's scale type, and so became zero."""


class PolyquantError(Exception):
    """The parent of every error here. ``slug`` is its stable name, ``facts`` what it was told."""

    message: ClassVar[str] = ""
    slug: ClassVar[str] = "polyquant-error"

    def __init_subclass__(cls) -> None:
        cls.slug = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(f"{_TEXT.vformat(self.message, (), facts)} [{self.slug}]")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)

    @classmethod
    def fields(cls) -> frozenset[str]:
        """The names of the facts that the text needs."""
        return frozenset(name for _, name, _, _ in Formatter().parse(cls.message) if name)


def _rebuild(cls: type[PolyquantError], facts: dict[str, Any]) -> PolyquantError:
    return cls(**facts)


# -- schemes and tables -----------------------------------------------------------------------


class UnknownScheme(PolyquantError, ValueError):
    """A text that is no scheme, preset or JSON form."""

    message = "{got!r} is not a scheme: {reason}. {fix}."


class UnknownName(PolyquantError, ValueError):
    """A value type, mode, store, scale type, table, calibration or similar that does not exist."""

    message = "There is no {what} {got!r}. Known: {known}. The nearest is {nearest!r}."


class InvalidScheme(PolyquantError, ValueError):
    """Parts of a scheme that have no meaning together."""

    message = "{scheme} cannot be: {reason}. The nearest valid scheme is {nearest!r}."


class InvalidBlock(PolyquantError, ValueError):
    """A block extent that is zero, negative or not an integer."""

    message = (
        "Block {block!r} has the extent {extent!r}; an extent is a whole number from 1 to "
        "2^63 - 1, or -1 for a whole axis. Pass block=None for one block over the whole tensor."
    )


class BlockRank(PolyquantError, ValueError):
    """A block with more axes than the tensor."""

    message = (
        "A block of {block} has {block_rank} axes, and the tensor of shape {shape} has {rank}. Use "
        "a block of no more axes than the tensor, block=None for one block over all of it, or "
        "reshape the tensor."
    )


class TableMissing(PolyquantError, ValueError):
    """A lookup scheme without entries."""

    message = (
        "Scheme {scheme} looks its codes up in a table of the tensor's own, and none came. Pass "
        "table= with {wanted} numbers, or table='kmeans' to fit one."
    )


class TableSuperfluous(PolyquantError, ValueError):
    """A table for a scheme that has none, or whose table is named."""

    message = (
        "Scheme {scheme} takes no table=: {reason}. Leave it out, or use the scheme {nearest!r}."
    )


class TableLength(PolyquantError, ValueError):
    """A table that does not have one entry per code."""

    message = (
        "A table for {bits}-bit codes has {wanted} entries in one dimension; the shape that came "
        "is {got}."
    )


class TableInvalid(PolyquantError, ValueError):
    """A table that holds NaN, infinity or nothing but zeros."""

    message = "The table cannot be used: {reason}."


class TableMismatch(PolyquantError, ValueError):
    """Entries that differ from the table that the scheme names."""

    message = (
        "The scheme names table {table!r}, but {differing} of the {length} entries that came "
        "differ from it. Use the table 'custom' to keep the entries that came."
    )


# -- quantizing -------------------------------------------------------------------------------


class NonFiniteInput(PolyquantError, ValueError):
    """NaN or infinity in what is to be quantized."""

    message = (
        "The input of shape {shape} holds {count} values that are NaN or infinite (beyond "
        "float32's range counts), the first at index {index}: {value}. Mend them, or pass "
        "nonfinite='saturate' (infinities go to the ends of the range, NaN to 0)."
    )


class NegativeInput(PolyquantError, ValueError):
    """Negative numbers for a scheme that can hold none."""

    message = (
        "Scheme {scheme} holds no negative numbers, and the input of shape {shape} has {count}, "
        "the first at index {index}: {value}. Use a signed value type or an offset, e.g. "
        "{nearest!r}."
    )


class NotFloat(PolyquantError, TypeError):
    """An array of integers, booleans or complex numbers where floats are needed."""

    message = (
        "{role} must be a floating-point array (float16, bfloat16, float32 or float64); what came "
        "is {dtype}. Convert it first, with {fix}."
    )


class NotAnArray(PolyquantError, TypeError):
    """An operand that is neither a QTensor nor an array of a known library."""

    message = (
        "{role} must be an array of a known library (NumPy, PyTorch, JAX, or any that follows the "
        "Python array API standard) or a QTensor; what came is {got}. Make it an array "
        "first, e.g. with numpy.asarray."
    )


class UnsupportedArray(PolyquantError, TypeError):
    """An array of a known library that holds no plain values: masked, sparse, meta or traced."""

    message = "{role} must hold plain values; what came is {got}. {fix}."


class AlreadyQuantized(PolyquantError, TypeError):
    """A QTensor where a float array is needed."""

    message = (
        "{role} must be a float array; what came is already quantized as {scheme}. Call "
        ".dequantize() first, and know that quantizing twice loses twice."
    )


class ScaleShape(PolyquantError, ValueError):
    """Scales or offsets that do not match the blocks."""

    message = (
        "{what} for {scheme} on shape {shape} form a grid of shape {wanted}; the shape that came "
        "is {got}."
    )


class InvalidScale(PolyquantError, ValueError):
    """Scales or offsets that are negative, NaN or infinite."""

    message = (
        "{what} must be {wanted}, and at {count} of the indices they are not, the first of them "
        "{index}: {value}."
    )


class ScaleArgument(PolyquantError, ValueError):
    """Scales or offsets passed for a scheme that takes them otherwise."""

    message = "Scheme {scheme} cannot take the {what} that came: {reason}."


class CalibrationRefused(PolyquantError, ValueError):
    """A calibration method that has no meaning for the scheme."""

    message = "Calibration {calibration!r} does not work for {scheme}: {reason}. {fix}."


class TracedCalibration(PolyquantError, TypeError):
    """A calibration that must look at values, in code that is being traced."""

    message = (
        "{what} looks at the values, which code under a tracer (such as jax.jit) cannot. "
        "Quantize outside it, or pass scales= computed before."
    )


# -- dispatch ---------------------------------------------------------------------------------


class BackendMismatch(PolyquantError, TypeError):
    """Operands of different array libraries."""

    message = (
        "{op} needs both operands in one library. {left_role} is {left}; {right_role} is {right}. "
        "Nothing is copied between libraries unasked: {fix}."
    )


class DeviceMismatch(PolyquantError, ValueError):
    """Operands of one library on different devices."""

    message = (
        "{op} needs both operands on one device. {left_role} is {left}; {right_role} is {right}. "
        "Nothing is copied between devices unasked: {fix}."
    )


class ShapeMismatch(PolyquantError, ValueError):
    """Shapes that an operation cannot combine."""

    message = "{op} cannot combine the shapes {left} and {right}: {reason}."


class NoKernel(PolyquantError, NotImplementedError):
    """No kernel takes the problem."""

    message = "No kernel can run {problem}. Asked, best first:\n{reasons}"


class KernelRefused(PolyquantError, ValueError):
    """A kernel pinned with ``kernel=`` that cannot run, or does not exist."""

    message = "kernel={kernel!r} cannot run {problem}: {reason}. A pinned kernel never falls back."


class UnknownDevice(PolyquantError, ValueError):
    """A device that is not named right, or is not there."""

    message = "There is no device {device!r}: {reason}. Usable here: {known}."


class BackendMissing(PolyquantError, ImportError):
    """An array library that is not installed, or fails to import."""

    message = "Backend {backend!r} is not usable: {reason}. {fix}."


class UnsupportedFunction(PolyquantError, TypeError):
    """A function of an array library that has no quantized form."""

    message = (
        "{function} has no form for quantized tensors. Supported on a QTensor: {known}. "
        "Otherwise call it on q.dequantize()."
    )


class HostCopyRefused(PolyquantError, TypeError):
    """An implicit conversion to NumPy of a tensor that lies on an accelerator."""

    message = (
        "A QTensor on {device} is not copied to the host unasked. Call q.to('numpy') or "
        "q.dequantize() first."
    )


# -- tensors and bytes ------------------------------------------------------------------------


class InvalidTensor(PolyquantError, ValueError):
    """Parts that do not make a QTensor."""

    message = "{part} of a {scheme} tensor of shape {shape} must be {wanted}; what came is {got}."


class InvalidAxes(PolyquantError, ValueError):
    """An axis that a tensor does not have, one named twice, or a permutation that lacks one."""

    message = (
        "{got!r} does not fit the {rank} axes of a tensor of shape {shape}: axes are counted from "
        "0, or from -1 at the end, each is named once at most, and a permutation names all."
    )


class InvalidIndex(PolyquantError, IndexError):
    """An index that a tensor does not have, or that is none."""

    message = "{index!r} does not index a tensor of shape {shape}: {reason}."


class LayoutRefused(PolyquantError, ValueError):
    """A layout operation whose result the scheme cannot hold without quantizing again."""

    message = "A {scheme} tensor of shape {shape} cannot stay quantized here: {reason}. {fix}."


class ShardingRefused(PolyquantError, ValueError):
    """A split over devices whose edges would cut a block or a packed word."""

    message = (
        "Axis {axis} of a {scheme} tensor of shape {shape} cannot be split into {count} shards: "
        "{reason}. Split it into {nearest}, or, where smaller blocks or words would do, pass "
        "reblock=True."
    )


class Immutable(PolyquantError, AttributeError):
    """An attempt to change a QTensor."""

    message = (
        "A QTensor does not change; {name!r} cannot be set. Make a new one with pq.quantize or "
        "q.to."
    )


class UnsupportedDtype(PolyquantError, TypeError):
    """A dtype that an output or a file cannot have."""

    message = "{what} cannot be {dtype!r}. Known: {known}."


class DataLength(PolyquantError, ValueError):
    """A buffer that is too short or too long for its scheme and shape."""

    message = "{what} of scheme {scheme} and shape {shape} has exactly {wanted} bytes; {got} came."


class CorruptData(PolyquantError, ValueError):
    """Bytes that cannot be what they claim: a NaN scale, a shape below zero, a failed checksum."""

    message = "{what} is corrupt: {reason}."


class UnsupportedVersion(PolyquantError, ValueError):
    """A form that a later polyquant wrote."""

    message = (
        "This {what} has version {got!r}; this polyquant reads version {known}. Upgrade polyquant "
        "to read it."
    )


class StateMismatch(PolyquantError, ValueError):
    """A state dict that holds another tensor than the module it is loaded into."""

    message = (
        "The module holds {name} as {wanted}; what the state dict holds is {got}. Make the module "
        "with the same scheme first, e.g. with quantize_, and then load."
    )


# -- files ------------------------------------------------------------------------------------


class UnreadableFile(PolyquantError, OSError):
    """A file that is missing, or that the system does not let us read."""

    message = "Cannot read {path}: {reason}."


class UnknownFormat(PolyquantError, ValueError):
    """A path whose format cannot be told, or is not known."""

    message = "Cannot tell the format of {path}: {reason}. Readable: {known}."


class InvalidHeader(PolyquantError, ValueError):
    """A file whose header is damaged or hostile."""

    message = "The header of {path} is not valid: {reason}. Fetch or write the file again."


class NotExact(PolyquantError, ValueError):
    """A conversion that would lose something without being asked to."""

    message = "{count} of {total} tensors cannot be in {target} exactly ({examples}). {fix}."


class ChecksumMismatch(PolyquantError, ValueError):
    """A tensor whose bytes are not those that were written."""

    message = (
        "Tensor {name!r} in {path} is damaged: its checksum is {got}, and {wanted} was written. "
        "Fetch or write the file again."
    )


class TensorNotFound(PolyquantError, KeyError):
    """A name that a checkpoint does not hold."""

    message = "{path} has no tensor {name!r}. The nearest names: {nearest}."

    def __str__(self) -> str:  # KeyError would show the repr of the text
        return str(self.args[0])


class InvalidName(PolyquantError, ValueError):
    """A tensor or metadata name that a file cannot hold."""

    message = "{name!r} cannot be saved: {reason}."


class WriteFailed(PolyquantError, OSError):
    """A file that could not be written; what was there before is untouched."""

    message = "Could not write {path}: {reason}. {kept}."


class NothingMatches(PolyquantError, ValueError):
    """Patterns that select nothing."""

    message = "{what} {patterns} match none of the {count} tensors. Names look like: {examples}."


class UnsupportedTree(PolyquantError, TypeError):
    """A leaf or container that a tree of parameters cannot have."""

    message = "{path} is {got}; a tree holds dicts, lists, tuples, pytrees of JAX and arrays."


class UnknownSlug(PolyquantError, ValueError):
    """A slug that names no error."""

    message = "There is no error {slug!r}. Did you mean {nearest!r}?"


class InvalidArgument(PolyquantError, ValueError):
    """An argument outside of what it can be."""

    message = "{name} must be {wanted}; what came is {got!r}."


#: Slug -> class, for every error.
CATALOGUE: Mapping[str, type[PolyquantError]] = MappingProxyType(
    {
        item.slug: item
        for item in list(globals().values())
        if isinstance(item, type) and issubclass(item, PolyquantError) and item.message
    }
)


#: The fields of a record that errors.toml holds, in the order in which they are shown.
_WRITTEN = (
    "severity",
    "documentation",
    "triggerScenarios",
    "commonSituations",
    "solutions",
    "exampleFix",
    "handlingStrategy",
    "validationCode",
    "typeGuard",
    "tryCatchPattern",
    "preventionTips",
    "tags",
)


@cache
def _records() -> dict[str, dict[str, Any]]:
    text = files("polyquant").joinpath("errors.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _pattern(cls: type[PolyquantError]) -> str:
    """A regular expression, of the kind that every language reads, for the whole text."""
    parts = []
    for literal, name, _, _ in Formatter().parse(f"{cls.message} [{cls.slug}]"):
        parts.append(re.sub(r"[.^$*+?{}()\[\]|\\]", r"\\\g<0>", literal).replace("\n", r"\n"))
        parts.append(r"[\s\S]*" if name else "")
    return "".join(parts)


def record(slug: str) -> dict[str, Any]:
    """The full record of an error, with the documented field names.

    ``messagePattern`` matches the whole text of the error, its ``[slug]`` included.

    Raises UnknownSlug with the nearest slug.
    """
    if not isinstance(slug, str) or slug not in CATALOGUE:
        near = get_close_matches(str(slug), CATALOGUE, n=1, cutoff=0.0)
        raise UnknownSlug(slug=slug, nearest=near[0])
    cls = CATALOGUE[slug]
    builtin = next(base for base in cls.__bases__ if base is not PolyquantError)
    derived = {
        "slug": slug,
        "errorMessage": cls.message,
        "messagePattern": _pattern(cls),
        "errorType": builtin.__name__,
        "errorClass": f"polyquant.errors.{cls.__name__}",
    }
    written = _records()[slug]
    return derived | {name: deepcopy(written[name]) for name in _WRITTEN}
