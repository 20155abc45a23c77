"""The scheme: what the codes of a tensor mean, as one immutable value with a text and a JSON form.

Text form::

    scheme  = value ["[" table "]"] "/" block ":" scale ["/tensor:" outer] [offset]
              ["~" ("grouped" | view)] ["@" store]
    block   = "tensor" | "row" | extent ("x" extent)*      extent = number | "*" (the whole axis)
    scale   = outer | "ue8m0" | "ue4m3" | "(" scheme ")"
    outer   = ["divisor." | "absmax."] ("f32" | "f16" | "bf16")
    offset  = "+bias:" (float | "(" scheme ")") | "-zero:" (float | "u1".."u8" | "(" scheme ")")
    view    = "flat" | extent ("x" extent)*                exactly one "*": what is left

``parse(str(s)) == s`` for every scheme. The default store, packed_u32, is not written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from polyquant.errors import (
    BlockRank,
    InvalidArgument,
    InvalidScheme,
    ShapeMismatch,
    UnknownName,
    UnknownScheme,
    UnsupportedVersion,
)
from polyquant.fields import (
    block_extents,
    block_text,
    flag,
    member,
    value_and_table,
    view_extents,
    view_text,
)
from polyquant.grammar import DEEPEST, SEE, read
from polyquant.presets import PRESETS
from polyquant.tables import CUSTOM, table_bits
from polyquant.values import OffsetKind as OffsetKind
from polyquant.values import (
    QuantMode,
    QuantStore,
    QuantValue,
    ScaleDtype,
    ScaleRole,
    is_known,
)

#: Version of the JSON form. A change of what a field means raises it.
JSON_VERSION = 1

_LONGEST_EXTENT = 2**63 - 1
_FLOAT_OFFSETS = (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16)
_E = TypeVar("_E", bound=StrEnum)


class Offset(NamedTuple):
    """The offset of an affine scheme: its kind, and how it is stored (or the scheme it has)."""

    kind: OffsetKind
    dtype: ScaleDtype | QuantValue | QuantScheme

    def __str__(self) -> str:
        return f"{self.kind}:{_in_parentheses(self.dtype)}"


@dataclass(frozen=True, init=False)
class QuantScheme:
    """What the codes of a tensor mean: value type, mode, blocks, scale types, offset, store.

    ``x[i] ~ decode(code[i]) * scale[block(i)]``, or with an offset ``(decode - zero) * scale`` or
    ``decode * scale + bias``.

    Args:
        value: a QuantValue or its name; ``"u4[nf4]"`` names a lookup table too, and
            ``"u4[custom]"`` says that the tensor brings its own.
        mode: "symmetric", "affine" (implied by an offset) or "lookup" (implied by a table).
        block: extents aligned to the trailing axes; -1 is a whole axis; leading ones are dropped;
            None is one block for the whole tensor.
        scale: a ScaleDtype or its name, or a QuantScheme (or its text) for quantized scales.
        tensor_scale: None, or "f32": one more scale, for the whole tensor, under the blocks'.
        offset: None, ``"bias:f16"``, ``"zero_point:u4"``, ``"zero_point:f16"``, an Offset, or a
            pair of a kind and a QuantScheme.
        store: "packed_u32", "packed_native" or "native".
        role: how the stored outermost scale acts: "multiplier", "divisor" or "absmax".
        view: None, or extents of which one is -1: lines and blocks are those of the (stored)
            tensor reshaped to them. (-1,) is flat: blocks run on across the ends of rows.
        grouped: whether the tensor holds a map from the elements of its last stored axis to the
            blocks along it (their groups), as GPTQ's activation order needs.

    Raises:
        InvalidScheme, InvalidBlock, UnknownName.
    """

    value: QuantValue
    mode: QuantMode
    block: tuple[int, ...] | None
    scale: ScaleDtype | QuantScheme
    tensor_scale: ScaleDtype | None
    offset: Offset | None
    store: QuantStore
    role: ScaleRole
    view: tuple[int, ...] | None
    grouped: bool
    table: str | None
    _hash: int = field(repr=False, compare=False)
    _text: str = field(repr=False, compare=False)

    def __init__(
        self,
        value: QuantValue | str = "q4s",
        *,
        mode: QuantMode | str = "symmetric",
        block: Sequence[int] | int | None = (32,),
        scale: ScaleDtype | QuantScheme | str = "f16",
        tensor_scale: ScaleDtype | str | None = None,
        offset: Offset | tuple[str, Any] | str | None = None,
        store: QuantStore | str = "packed_u32",
        role: ScaleRole | str = "multiplier",
        view: Sequence[int] | int | None = None,
        grouped: bool = False,
    ) -> None:
        kind, table = value_and_table(value)
        mode = member(QuantMode, mode, "mode")
        parsed_offset = _offset(offset)
        if mode is QuantMode.SYMMETRIC and parsed_offset is not None:
            mode = QuantMode.AFFINE
        if table is not None or mode is QuantMode.LOOKUP:
            mode, table = QuantMode.LOOKUP, table or CUSTOM
            if not kind.is_float:  # under a lookup only the width of an integer counts
                kind = QuantValue(f"u{kind.bits}")
        fields = {
            "value": kind,
            "mode": mode,
            "block": block_extents(block),
            "scale": _scale(scale),
            "tensor_scale": None
            if tensor_scale is None
            else member(ScaleDtype, tensor_scale, "scale type"),
            "offset": parsed_offset,
            "store": member(QuantStore, store, "store"),
            "role": member(ScaleRole, role, "role of a scale"),
            "view": view_extents(view),
            "grouped": flag(grouped, "grouped"),
            "table": table,
        }
        for name, item in fields.items():
            object.__setattr__(self, name, item)
        object.__setattr__(self, "_hash", hash(tuple(fields.values())))
        object.__setattr__(self, "_text", _text(self))
        _check(self)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (str(self),)

    # -- what follows from the fields ---------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.value.bits

    @property
    def num_levels(self) -> int:
        """1, or 2 with a tensor scale under the block scales."""
        return 1 if self.tensor_scale is None else 2

    @property
    def extras(self) -> tuple[str, ...]:
        """What it has beyond blocks of rows under scales that multiply, in words.

        Kernels that do not ask for these decline a scheme that has any.
        """
        inner = (self.scale, None if self.offset is None else self.offset.dtype)
        found = [word for s in inner if isinstance(s, QuantScheme) for word in s.extras]
        if self.role is not ScaleRole.MULTIPLIER:
            found.append(f"a scale that is a {self.role}")
        if self.view is not None:
            found.append(f"blocks of the tensor viewed as {view_text(self.view)}")
        if self.grouped:
            found.append("a map from elements to groups")
        if self.table is not None and self.offset is not None:
            found.append("a bias beside a table")
        return tuple(found)

    @property
    def is_plain(self) -> bool:
        """Whether it has no ``extras``."""
        return not self.extras

    def laid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape whose lines and blocks are stored: ``shape``, or the view of as many elements.

        Raises ShapeMismatch where the view's extents do not divide them.
        """
        if self.view is None:
            return tuple(shape)
        size, rest = math.prod(shape), math.prod(e for e in self.view if e != -1)
        if size % rest:
            reason = f"a view of {rest} does not divide {size} elements"
            raise ShapeMismatch(op="The view", left=self.view, right=tuple(shape), reason=reason)
        return tuple(size // rest if e == -1 else e for e in self.view)

    def block_extents(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The block's extent along every axis of ``laid(shape)``, at least 1, cut to the axis.

        Raises BlockRank where the block has more axes than the shape.
        """
        return self._extents(self.laid(shape))

    def _extents(self, shape: Sequence[int]) -> tuple[int, ...]:
        if self.block is None:
            return tuple(max(d, 1) for d in shape)
        missing = len(shape) - len(self.block)
        if missing < 0:
            raise BlockRank(
                block="x".join(map(str, self.block)),
                block_rank=len(self.block),
                shape=tuple(shape),
                rank=len(shape),
            )
        full = (1,) * missing + self.block
        return tuple(max(1, d if b == -1 else min(b, d)) for b, d in zip(full, shape, strict=True))

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scale grid: one per block, with the rank of ``laid(shape)``."""
        shape = self.laid(shape)
        if self.block is None:
            return (1,) * len(shape)
        extents = self._extents(shape)
        return tuple(-(-d // b) for d, b in zip(shape, extents, strict=True))

    # -- builders -----------------------------------------------------------------------------

    def with_value(self, value: QuantValue | str) -> QuantScheme:
        """The same scheme with another value type (a lookup keeps its table, if the width fits)."""
        kind, table = value_and_table(value)
        if table is None and self.mode is QuantMode.LOOKUP and self.table is not None:
            same_width = self.table == CUSTOM or table_bits(self.table) == kind.bits
            table = self.table if same_width else CUSTOM
        return self._with(value=f"{kind}[{table}]" if table else kind)

    def with_mode(self, mode: QuantMode | str) -> QuantScheme:
        """The same scheme with another mode; leaving lookup or affine drops table or offset."""
        mode = member(QuantMode, mode, "mode")
        dropped = None if mode is not QuantMode.AFFINE else self.offset
        return self._with(value=self.value, mode=mode, offset=dropped)

    def with_store(self, store: QuantStore | str) -> QuantScheme:
        """The same scheme with another store: the same codes, other bytes."""
        return self._with(store=store)

    def with_role(self, role: ScaleRole | str) -> QuantScheme:
        """The same scheme whose outermost scale, as stored, acts otherwise."""
        return self._with(role=role)

    def with_offset(self, offset: Offset | tuple[str, Any] | str | None) -> QuantScheme:
        """The same scheme with another offset, or none."""
        return self._with(offset=offset, mode="symmetric" if offset is None else "affine")

    def per_block(
        self, block: Sequence[int] | int, scale: ScaleDtype | QuantScheme | str = "f16"
    ) -> QuantScheme:
        """One scale per block. After ``per_tensor`` the tensor's scale stays as a second level."""
        second = self.scale if self.block is None and self.tensor_scale is None else None
        tensor_scale = second if second is ScaleDtype.F32 else self.tensor_scale
        return self._with(block=block, scale=scale, tensor_scale=tensor_scale)

    def per_tensor(self, scale: ScaleDtype | str = "f32") -> QuantScheme:
        """One f32 scale for the whole tensor under the block scales, making two levels.

        A scheme without blocks gets the scale type itself.
        """
        if self.block is None:
            return self._with(scale=scale)
        return self._with(tensor_scale=scale)

    def _with(self, **changes: Any) -> QuantScheme:
        return QuantScheme(**(_arguments(self) | changes))

    # -- text and JSON ------------------------------------------------------------------------

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"QuantScheme({str(self)!r})"

    def to_json(self) -> dict[str, Any]:
        """The JSON form: plain dicts, lists, strings and numbers.

        ``role``, ``view`` and ``grouped`` stand there only where they are not the default.
        """
        more: dict[str, Any] = {}
        if self.role is not ScaleRole.MULTIPLIER:
            more["role"] = str(self.role)
        if self.view is not None:
            more["view"] = list(self.view)
        if self.grouped:
            more["grouped"] = True
        return more | {
            "version": JSON_VERSION,
            "value": str(self.value),
            "mode": str(self.mode),
            "table": self.table,
            "block": None if self.block is None else list(self.block),
            "scale": _dtype_json(self.scale),
            "tensor_scale": None if self.tensor_scale is None else str(self.tensor_scale),
            "offset": None
            if self.offset is None
            else {"kind": str(self.offset.kind), "dtype": _dtype_json(self.offset.dtype)},
            "store": str(self.store),
        }

    @classmethod
    def from_json(cls, form: dict[str, Any] | str) -> QuantScheme:
        """The scheme of a JSON form (a dict, or its text).

        Raises UnknownScheme, UnsupportedVersion, or what the constructor raises.
        """
        if isinstance(form, str):
            try:
                form = json.loads(form)
            except (ValueError, RecursionError) as error:
                reason = f"it is not JSON ({error})"
                raise UnknownScheme(got=form, reason=reason, fix=SEE) from None
        return _scheme_of(form, depth=1)


def _arguments(s: QuantScheme) -> dict[str, Any]:
    """The arguments that make a scheme."""
    return {
        "value": f"{s.value}[{s.table}]" if s.table else s.value,
        "mode": s.mode,
        "block": s.block,
        "scale": s.scale,
        "tensor_scale": s.tensor_scale,
        "offset": s.offset,
        "store": s.store,
        "role": s.role,
        "view": s.view,
        "grouped": s.grouped,
    }


def _text(scheme: QuantScheme) -> str:
    """The text form, which every scheme makes once."""
    text = f"{scheme.value}[{scheme.table}]" if scheme.table else str(scheme.value)
    role = "" if scheme.role is ScaleRole.MULTIPLIER else f"{scheme.role}."
    inner, outer = (role, "") if scheme.tensor_scale is None else ("", role)
    text += f"/{block_text(scheme.block)}:{inner}{_in_parentheses(scheme.scale)}"
    if scheme.tensor_scale is not None:
        text += f"/tensor:{outer}{scheme.tensor_scale}"
    if scheme.offset is not None:
        sign = "+bias:" if scheme.offset.kind is OffsetKind.BIAS else "-zero:"
        text += sign + _in_parentheses(scheme.offset.dtype)
    if scheme.view is not None:
        text += f"~{view_text(scheme.view)}"
    text += "~grouped" if scheme.grouped else ""
    return text if scheme.store is QuantStore.PACKED_U32 else f"{text}@{scheme.store}"


def _scheme_of(form: Any, *, depth: int) -> QuantScheme:
    """The scheme of a JSON form that may come from outside, ``depth`` schemes deep."""
    reason = None
    if not isinstance(form, dict) or set(form) - _JSON_MORE != _JSON_FIELDS:
        reason = f"a JSON form has exactly the fields {', '.join(sorted(_JSON_FIELDS))}"
    elif depth > DEEPEST:
        reason = f"at most {DEEPEST} schemes lie in one another"
    elif form["offset"] is not None and (
        not isinstance(form["offset"], dict) or set(form["offset"]) != {"kind", "dtype"}
    ):
        reason = "its offset needs kind and dtype, or null"
    if reason is not None:
        raise UnknownScheme(got=form, reason=reason, fix=SEE)
    if not isinstance(form["version"], int) or form["version"] != JSON_VERSION:
        raise UnsupportedVersion(what="scheme", got=form["version"], known=JSON_VERSION)

    def dtype(inner: Any) -> Any:
        return _scheme_of(inner, depth=depth + 1) if isinstance(inner, dict) else inner

    offset, table = form["offset"], form["table"]
    scheme = QuantScheme(
        f"{form['value']}[{table}]" if table is not None else form["value"],
        mode=form["mode"],
        block=form["block"],
        scale=dtype(form["scale"]),
        tensor_scale=form["tensor_scale"],
        offset=None if offset is None else (offset["kind"], dtype(offset["dtype"])),
        store=form["store"],
        role=form.get("role", "multiplier"),
        view=form.get("view"),
        grouped=form.get("grouped", False),
    )
    made = scheme.to_json()
    field = next((name for name in sorted(form) if made.get(name) != form[name]), None)
    if field is not None:
        other = made.get(field)
        reason = f"its {field} {form[field]!r} disagrees with its other fields ({other!r})"
        raise UnknownScheme(got=form, reason=reason, fix=SEE)
    return scheme


_JSON_FIELDS = frozenset(
    ("version", "value", "mode", "table", "block", "scale", "tensor_scale", "offset", "store")
)
_JSON_MORE = frozenset(("role", "view", "grouped"))


# -- presets ----------------------------------------------------------------------------------


def presets() -> dict[str, QuantScheme]:
    """Every preset: name -> scheme."""
    return {name: parse(text) for name, text in PRESETS.items()}


def scheme(text: str | QuantScheme) -> QuantScheme:
    """The scheme of a preset's name, a text form, or a value alone (``QuantScheme("q4s")``).

    Raises UnknownScheme with the nearest name, or what the constructor raises.
    """
    if isinstance(text, QuantScheme):
        return text
    return _named(text) if isinstance(text, str) else parse(text)


@lru_cache(maxsize=512)
def _named(text: str) -> QuantScheme:
    return parse(PRESETS.get(text, text))


# -- the parser -------------------------------------------------------------------------------


def parse(text: str) -> QuantScheme:
    """The scheme of a text form. Raises UnknownScheme with the place, or the nearest name."""
    return _built(read(text))


def _built(fields: dict[str, Any]) -> QuantScheme:
    """The scheme of what a text says, inner schemes first."""
    given = dict(fields)
    if isinstance(given.get("scale"), dict):
        given["scale"] = _built(given["scale"])
    if "offset" in given and isinstance(given["offset"][1], dict):
        given["offset"] = (given["offset"][0], _built(given["offset"][1]))
    return QuantScheme(**given)


# -- one field at a time ----------------------------------------------------------------------


def _scale(scale: Any) -> ScaleDtype | QuantScheme:
    if isinstance(scale, QuantScheme):
        return scale
    if isinstance(scale, str) and not is_known(ScaleDtype, scale) and "/" in scale:
        return parse(scale)
    return member(ScaleDtype, scale, "scale type")


def _offset(offset: Any) -> Offset | None:
    if offset is None:
        return None
    pair = offset.split(":", 1) if isinstance(offset, str) else offset
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        wanted = "a kind and a type, such as 'bias:f16' or 'zero_point:u4'"
        raise InvalidArgument(name="offset", wanted=wanted, got=offset)
    kind, dtype = member(OffsetKind, pair[0], "kind of offset"), pair[1]
    if isinstance(dtype, QuantScheme):
        return Offset(kind, dtype)
    if isinstance(dtype, str) and "/" in dtype:
        return Offset(kind, parse(dtype))
    if is_known(QuantValue, dtype):
        return Offset(kind, QuantValue(dtype))
    if is_known(ScaleDtype, dtype):
        return Offset(kind, ScaleDtype(dtype))
    known = [*_FLOAT_OFFSETS, *(value for value in QuantValue if not value.is_signed)]
    near = get_close_matches(str(dtype), known, n=1, cutoff=0.0)
    what, names = "offset type", ", ".join(known)
    raise UnknownName(what=what, got=dtype, known=names, nearest=str(near[0]))


def _in_parentheses(dtype: StrEnum | QuantScheme) -> str:
    return f"({dtype})" if isinstance(dtype, QuantScheme) else str(dtype)


def _dtype_json(dtype: StrEnum | QuantScheme) -> str | dict[str, Any]:
    return dtype.to_json() if isinstance(dtype, QuantScheme) else str(dtype)


# -- what goes together -----------------------------------------------------------------------


def _check(s: QuantScheme) -> None:
    """Refuse combinations that have no meaning, with the nearest that has one."""
    if _depth(s) > DEEPEST:
        reason = f"at most {DEEPEST} schemes lie in one another"
        _refuse(reason, s, scale=ScaleDtype.F16, offset=None)
    inner = (s.scale, None if s.offset is None else s.offset.dtype)
    if any(isinstance(i, QuantScheme) and i.view is not None for i in inner):
        reason = "scales and offsets lie on the grid, which has no view of its own"
        _refuse(reason, s, scale=ScaleDtype.F16, offset=None)
    if s.grouped:
        _check_grouped(s)
    _check_value(s)
    _check_offset(s)
    _check_role(s)
    if s.tensor_scale is not None:
        _check_tensor_scale(s)


def _depth(s: QuantScheme) -> int:
    """How many schemes lie in one another, this one included."""
    inner = (s.scale, None if s.offset is None else s.offset.dtype)
    return 1 + max((_depth(i) for i in inner if isinstance(i, QuantScheme)), default=0)


def _check_value(s: QuantScheme) -> None:
    if s.mode is QuantMode.LOOKUP:
        if s.value.is_float:
            unsigned = f"u{s.bits}[{s.table}]"
            _refuse("a lookup code is an index, so a minifloat has no meaning", s, value=unsigned)
        if s.offset is not None and s.offset.kind is OffsetKind.ZERO_POINT:
            _refuse("a table already has its own zero, so it takes no zero point", s, offset=None)
        if s.table is not None and s.table != CUSTOM and table_bits(s.table) != s.bits:
            right = f"u{table_bits(s.table)}[{s.table}]"
            reason = f"table {s.table} has {2 ** table_bits(s.table)} entries, not {2**s.bits}"
            _refuse(reason, s, value=right)
    if s.mode is QuantMode.AFFINE and (s.value.is_float or s.value.is_signed):
        unsigned = f"u{s.bits}"
        _refuse(f"affine codes are unsigned, and {s.value} is not", s, value=unsigned)


def _check_offset(s: QuantScheme) -> None:
    if s.mode is QuantMode.AFFINE and s.offset is None:
        _refuse("affine needs an offset", s, offset=f"zero_point:u{s.bits}")
    if s.offset is None:
        return
    kind, dtype = s.offset
    if isinstance(dtype, QuantValue) and (kind is OffsetKind.BIAS or dtype[0] != "u"):
        reason = f"{kind} cannot be stored as {dtype}: integers are for zero points, unsigned"
        right = "bias:f16" if kind is OffsetKind.BIAS else f"zero_point:u{s.bits}"
        _refuse(reason, s, offset=right)
    if isinstance(dtype, ScaleDtype) and dtype not in _FLOAT_OFFSETS:
        _refuse(f"an offset needs a sign, which {dtype} lacks", s, offset=f"{kind}:f16")
    if isinstance(dtype, QuantScheme) and kind is OffsetKind.ZERO_POINT:
        _refuse("a quantized zero point would shift every code", s, offset=f"{kind}:u{s.bits}")


def _check_grouped(s: QuantScheme) -> None:
    inner = (s.scale, None if s.offset is None else s.offset.dtype)
    if any(isinstance(i, QuantScheme) for i in inner):
        reason = "the groups of a map have plain scales and offsets"
        _refuse(reason, s, grouped=False)
    if s.block is None or s.view is not None:
        _refuse("a map gives the group along the tensor's own last axis", s, grouped=False)


def _check_role(s: QuantScheme) -> None:
    outer = s.scale if s.tensor_scale is None else s.tensor_scale
    if s.role is not ScaleRole.MULTIPLIER and outer not in _FLOAT_OFFSETS:
        _refuse(f"a {s.role} is a float, not {outer}", s, role=ScaleRole.MULTIPLIER)
    if s.role is ScaleRole.ABSMAX and s.mode is not QuantMode.SYMMETRIC:
        reason = "an offset or a table leaves no largest number to divide a maximum by"
        _refuse(reason, s, role=ScaleRole.MULTIPLIER)


def _check_tensor_scale(s: QuantScheme) -> None:
    if s.block is None:
        reason = "a tensor scale under a per-tensor scale is the same number twice"
        _refuse(reason, s, tensor_scale=None)
    if s.tensor_scale is not ScaleDtype.F32:
        _refuse(f"the tensor scale is always f32, not {s.tensor_scale}", s, tensor_scale="f32")
    if isinstance(s.scale, QuantScheme):
        reason = "quantized scales have their own scale, so a tensor scale is one too many"
        _refuse(reason, s, tensor_scale=None)
    if s.scale is ScaleDtype.UE8M0:
        reason = "ue8m0 reaches every magnitude, so a tensor scale has nothing to do"
        _refuse(reason, s, tensor_scale=None)


def _refuse(reason: str, s: QuantScheme, **nearest: Any) -> None:
    given = _arguments(s)
    if s.mode is QuantMode.AFFINE:  # an offset implies it
        given["mode"] = QuantMode.SYMMETRIC
    raise InvalidScheme(scheme=str(s), reason=reason, nearest=str(QuantScheme(**(given | nearest))))
