"""A small language for the input lists of operations, and the matching of operations with the lists (rule V8).

An input list consists of names with kinds, in order, with ``[ ]`` around trailing options::

    x:T filter:W bias:B scheme:i32 stride_w:i32 stride_h:i32 act:i32 [nchw:bool@1.2 [dilation_w:i32 dilation_h:i32]]

Kinds:

* ``T``: the operation's data type
* ``any``: every type
* a kind in `_FOLLOWS`, which depends on T, such as ``fx`` (float scalar), ``W`` (filter) and ``B`` (bias)
* short names of operand types, with ``|`` between alternatives

Notations:

* ``T+``: one or more inputs
* ``T*``: any number of inputs
* ``@1.2``: first HAL version of an option or type
* ``I32?``: an input that can be omitted: its operand is in the list, but has no value
* ``x/2-4:T``: an input of rank 2 to 4
* ``out:T=x``: an output with the quantisation of x
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ..errors import InvalidArgument
from .operand_types import OPERANDS, HalVersion, OperandType, type_name
from .operation_view import Match, OperationView, OutputSpec, Param, Signature
from .types import OperandDesc, Operation

_BY_SHORT = {info.short: info.type for info in OPERANDS.values()}
_VERSIONS = {"1.0": HalVersion.V1_0, "1.1": HalVersion.V1_1, "1.2": HalVersion.V1_2, "1.3": HalVersion.V1_3}
_PARAM = re.compile(
    r"(?P<name>\w+)(?:/(?P<least>\d)(?:-(?P<most>\d))?)?:(?P<kinds>[\w|.@]+?)(?P<suffix>[+?*]?)"
    r"(?:@(?P<since>\d\.\d))?(?:=(?P<like>\w+))?$"
)
_T = OperandType
_QUANT8 = (_T.TENSOR_QUANT8_ASYMM, _T.TENSOR_QUANT8_ASYMM_SIGNED)
_CASTS = (_T.TENSOR_FLOAT32, _T.TENSOR_FLOAT16, _T.TENSOR_INT32, _T.TENSOR_QUANT8_ASYMM)
_TENSOR_OF = {_T.FLOAT32: _T.TENSOR_FLOAT32, _T.FLOAT16: _T.TENSOR_FLOAT16, _T.INT32: _T.TENSOR_INT32}


def _for_quant8(*types: OperandType) -> dict[OperandType, tuple[OperandType, ...]]:
    return dict.fromkeys(_QUANT8, types)


_FOLLOWS: dict[str, Mapping[OperandType, tuple[OperandType, ...]]] = {
    "fx": {kind: (_T.FLOAT16 if kind is _T.TENSOR_FLOAT16 else _T.FLOAT32,) for kind in OperandType},
    "fill": dict.fromkeys(_QUANT8, (_T.INT32,)) | {_T.TENSOR_FLOAT32: (_T.FLOAT32,), _T.TENSOR_FLOAT16: (_T.FLOAT16,)},
    "filled": {scalar: (tensor,) for scalar, tensor in _TENSOR_OF.items()},
    "W": {kind: (kind, _T.TENSOR_QUANT8_SYMM_PER_CHANNEL) for kind in _QUANT8},
    "B": _for_quant8(_T.TENSOR_INT32),
    "box": _for_quant8(_T.TENSOR_QUANT16_ASYMM),
    "anchor": _for_quant8(_T.TENSOR_QUANT16_SYMM),
    "delta": {_T.TENSOR_QUANT16_ASYMM: _QUANT8},
    "cast": dict.fromkeys((*_CASTS,), _CASTS),
}
"""Operand types that a kind accepts, by kind and T. A kind without an entry for T accepts only T itself."""


def _accepts(param: Param, operand_type: int, data_type: OperandType | None, version: HalVersion) -> bool:
    """Return True if a parameter accepts an operand type. In signatures, "T" stands for `data_type`."""
    return any(operand_type in types_of(kind, data_type) and version >= since for kind, since in param.kinds)


def types_of(kind: str, data_type: OperandType | None) -> tuple[OperandType, ...]:
    """Return the operand types that a signature's `kind` allows. The kind "T" stands for `data_type`."""
    if kind in _BY_SHORT:
        return (_BY_SHORT[kind],)
    if kind == "any":
        return tuple(OperandType)
    if data_type is None:
        return ()
    return _FOLLOWS.get(kind, {}).get(data_type, (data_type,))


def _kinds(text: str) -> tuple[tuple[str, HalVersion], ...]:
    pairs = (part.partition("@") for part in text.split("|"))
    return tuple((kind, _VERSIONS[since or "1.0"]) for kind, _, since in pairs)


def _param(text: str) -> Param:
    found = _PARAM.match(text)
    if found is None:
        raise ValueError(f"bad parameter {text!r}")
    return Param(
        found["name"],
        _kinds(found["kinds"]),
        _VERSIONS[found["since"] or "1.0"],
        may_be_omitted=found["suffix"] == "?",
        least=0 if found["suffix"] == "*" else 1,
        variadic=found["suffix"] in ("+", "*"),
        ranks=(int(found["least"]), int(found["most"] or found["least"])) if found["least"] else None,
        like=found["like"],
    )


def _expand(form: str) -> list[tuple[Param, ...]]:
    """Turn ``a [b [c]]`` into (a), (a, b), (a, b, c). HAL versions are raised so that they never decrease."""
    expansions: list[tuple[Param, ...]] = []
    params: list[Param] = []
    for level in form.replace("]", "").split("["):
        since = params[-1].since if params else HalVersion.V1_0
        for param in map(_param, level.split()):
            later = max(since, param.since)
            params.append(replace(param, since=later))
            since = later
        expansions.append(tuple(params))
    return expansions


def signature(
    forms: str | Sequence[str],
    types: str,
    infer: Callable[[OperationView], tuple[OutputSpec, ...]],
    outputs: str | Sequence[str] = "out:T",
    *,
    output_quantisation: Mapping[OperandType, tuple[float, int]] | None = None,
    check: Callable[[OperationView], None] | None = None,
    zero_sized: bool = False,
    measured: bool = False,
) -> Signature:
    """Make a table row from text: input lists, data types such as ``"F32 F16@1.2 Q8"``, output lists.

    The module's docstring explains the language. `Signature` explains the options.
    """
    kinds = [_kinds(word)[0] for word in types.split()]
    inputs, results = _expand_all(forms), _expand_all(outputs)
    return Signature(
        forms=inputs,
        types={_BY_SHORT[kind]: since for kind, since in kinds},
        outputs=results,
        infer=infer,
        ranks={param.name: param.ranks for form in inputs for param in form if param.ranks},
        output_quantisation=results[0][0].like or output_quantisation,
        check=check,
        zero_sized=zero_sized,
        measured=measured,
    )


def _expand_all(texts: str | Sequence[str]) -> tuple[tuple[Param, ...], ...]:
    return tuple(form for text in ([texts] if isinstance(texts, str) else texts) for form in _expand(text))


def _spread(form: tuple[Param, ...], count: int) -> list[Param] | None:
    """Repeat the variadic parameter to get `count` parameters; return None if that is impossible."""
    many = next((param for param in form if param.variadic), None)
    extra = count - len(form)
    if many is None or extra == 0:
        return list(form) if extra == 0 else None
    if 1 + extra < many.least:
        return None
    spread: list[Param] = []
    for param in form:
        spread += [param] * (1 + extra if param is many else 1)
    return spread


def match_signature(
    row: Signature,
    operation: Operation,
    operands: Sequence[OperandDesc],
    version: HalVersion = HalVersion.V1_3,
    *,
    with_outputs: bool = True,
) -> Match:
    """Return the input list of `row` that an operation's inputs fit. Also check the number and types of the outputs.

    Args:
        with_outputs: False if the outputs do not exist yet.

    Raises:
        InvalidArgument: No input list fits, or the outputs do not fit. The message is about the list that fits best.
    """
    types = [operands[index].type for index in operation.inputs]
    problems: list[tuple[int, str]] = [(-1, f"{len(types)} inputs, but it takes {_counts(row)}")]
    for form in row.forms:
        spread = _spread(form, len(types))
        if spread is None:
            continue
        data_type = _data_type(spread, types)
        problem = _first_problem(spread, types, data_type, row, version)
        if problem is None and data_type is not None:
            if with_outputs:
                _check_outputs(row, operation, operands, data_type, version)
            return _match(spread, data_type)
        if problem is not None:
            problems.append(problem)
    raise InvalidArgument(max(problems)[1])


def _counts(row: Signature) -> str:
    counts = sorted({sum(param.least for param in form) for form in row.forms})
    more = " or more" if any(param.variadic for form in row.forms for param in form) else ""
    return ", ".join(map(str, counts)) + more


def _data_type(spread: list[Param], types: list[int]) -> OperandType | None:
    for param, operand_type in zip(spread, types, strict=True):
        if param.kinds[0][0] == "T":
            return OperandType(operand_type) if operand_type in OPERANDS else None
    return None


def _first_problem(
    spread: list[Param], types: list[int], data_type: OperandType | None, row: Signature, version: HalVersion
) -> tuple[int, str] | None:
    """Return (position, message) of the first input that does not fit; None if all fit."""
    since = None if data_type is None else row.types.get(data_type)
    if since is None or version < since:
        position = next(i for i, param in enumerate(spread) if param.kinds[0][0] == "T")
        accepted = ", ".join(info.name for info, first in row.types.items() if version >= first)
        return position, f"input {position} ({spread[position].name}) is {type_name(types[position])}, not {accepted}"
    for position, (param, operand_type) in enumerate(zip(spread, types, strict=True)):
        if version < param.since:
            return position, f"input {position} ({param.name}) needs a later HAL version than {version.name}"
        if not _accepts(param, operand_type, data_type, version):
            wanted = " or ".join(t.name for kind, _ in param.kinds for t in types_of(kind, data_type))
            return position, f"input {position} ({param.name}) is {type_name(operand_type)}, not {wanted}"
    return None


def _check_outputs(
    row: Signature, operation: Operation, operands: Sequence[OperandDesc], data_type: OperandType, version: HalVersion
) -> None:
    count = len(operation.outputs)
    spreads = [(form, _spread(form, count)) for form in row.outputs if all(version >= param.since for param in form)]
    spread = next((spread for _, spread in spreads if spread is not None), None)
    if spread is None:
        allowed = " or ".join(str(len(form)) for form, _ in spreads)
        raise InvalidArgument(f"{count} outputs, but it gives {allowed}")
    for position, (param, index) in enumerate(zip(spread, operation.outputs, strict=True)):
        found = operands[index].type
        if not _accepts(param, found, data_type, version):
            wanted = " or ".join(t.name for kind, _ in param.kinds for t in types_of(kind, data_type))
            raise InvalidArgument(f"output {position} is {type_name(found)}, not {wanted}")


def _match(spread: list[Param], data_type: OperandType) -> Match:
    positions: dict[str, list[int]] = {}
    for position, param in enumerate(spread):
        positions.setdefault(param.name, []).append(position)
    omittable = frozenset(i for i, param in enumerate(spread) if param.may_be_omitted)
    return Match(data_type, {name: tuple(places) for name, places in positions.items()}, omittable)
