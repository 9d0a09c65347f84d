"""The operation table, part: recurrent operations, which apply a cell once or to every step of a sequence."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from .common import FLOAT, LATE_FLOAT, Outputs, like_data, require_equal

_GATES = ("in", "forget", "cell", "out")


def _gates(prefix: str, kind: str, omittable: str = "", suffix: str = "", gates: tuple[str, ...] = _GATES) -> str:
    """Return an input list with one input per gate. The inputs of `omittable` gates (``*``: all) can be omitted."""
    return " ".join(
        f"{prefix}_{gate}{suffix}:{kind}{'?' if omittable == '*' or gate in omittable.split() else ''}"
        for gate in gates
    )


def _matrices(prefix: str, suffix: str) -> str:
    """Return an input list of the gates' weights. The output gate's weights determine the cell's sizes."""
    return f"{_gates(prefix, 'T', 'in', suffix, _GATES[:3])} {prefix}_out{suffix}/2:T"


def _lstm(suffix: str = "") -> str:
    """Describe LSTM's inputs 1 to 17 for `row`: weights, recurrent weights, peepholes, biases, projection."""
    return (
        f"{_matrices('w', suffix)} {_matrices('r', suffix)} {_gates('p', 'T', '*', suffix, ('in', 'forget', 'out'))} "
        f"{_gates('b', 'T', 'in', suffix)} proj{suffix}:T? proj_bias{suffix}:T?"
    )


_CLIPS = "activation:i32 cell_clip:fx proj_clip:fx"


def _cell_sizes(view: OperationView, suffix: str = "") -> tuple[int, int]:
    units, outputs = view.dims(f"r_out{suffix}")
    require_equal("the number of units of w_out", view.dims(f"w_out{suffix}")[0], units, view.partial)
    require_equal("the input size of w_out", view.dims(f"w_out{suffix}")[1], view.dims("x")[-1], view.partial)
    _check_gates(view, suffix)
    return units, outputs


def _check_gates(view: OperationView, suffix: str) -> None:
    """Check that the input gate has all inputs or none, and that layer normalisation has all weights or none."""
    present = {name: view.is_given(f"{name}_in{suffix}") for name in ("w", "r", "b")}
    if len(set(present.values())) > 1:
        raise InvalidArgument(f"the input gate has only some of its inputs: {present}")
    normalised = [view.is_given(f"n_{gate}{suffix}") for gate in _GATES]
    if any(normalised) and normalised != [present["w"], True, True, True]:
        raise InvalidArgument(f"layer normalisation has only some of its weights: {normalised}")


def _infer_lstm(view: OperationView) -> Outputs:
    """Infer the outputs of LSTM: scratch space, output state, cell state, output."""
    units, outputs = _cell_sizes(view)
    batch = view.dims("x")[0]
    scratch = units * (4 if view.is_given("w_in") else 3)
    return like_data(view, (batch, scratch), (batch, outputs), (batch, units), (batch, outputs))


def _steps_and_batch(view: OperationView) -> tuple[int, int]:
    dims = view.dims("x")
    return (dims[0], dims[1]) if view.integer("time_major") else (dims[1], dims[0])


def _sequence(view: OperationView, width: int) -> tuple[int, int, int]:
    first, second, _ = view.dims("x")
    return first, second, width


def _infer_sequence_lstm(view: OperationView) -> Outputs:
    units, outputs = _cell_sizes(view)
    _, batch = _steps_and_batch(view)
    return like_data(view, _sequence(view, outputs), (batch, outputs), (batch, units))


def _bidirectional_outputs(view: OperationView, forward: int, backward: int, states: list[tuple[int, int]]) -> Outputs:
    """Return the outputs of a bidirectional operation: one merged sequence or two sequences, then the last states.

    The states are optional.
    """
    merged = bool(view.integer("merge"))
    shapes = [_sequence(view, forward + backward)] if merged else [_sequence(view, n) for n in (forward, backward)]
    count = len(view.operation.outputs)
    if count not in (0, len(shapes), len(shapes) + len(states)):
        raise InvalidArgument(f"{count} outputs, but it gives {len(shapes)} or {len(shapes) + len(states)}")
    return like_data(view, *shapes, *states)


def _infer_both_lstm(view: OperationView) -> Outputs:
    _, batch = _steps_and_batch(view)
    (fw_units, fw_outputs), (bw_units, bw_outputs) = _cell_sizes(view, "_fw"), view.dims("r_out_bw")
    _check_gates(view, "_bw")
    states = [(batch, fw_outputs), (batch, fw_units), (batch, bw_outputs), (batch, bw_units)]
    return _bidirectional_outputs(view, fw_outputs, bw_outputs, states)


def _infer_rnn(view: OperationView) -> Outputs:
    shape = (view.dims("x")[0], view.dims("w")[0])
    return like_data(view, shape, shape)


def _infer_sequence_rnn(view: OperationView) -> Outputs:
    units = view.dims("w")[0]
    return like_data(view, _sequence(view, units), (_steps_and_batch(view)[1], units))


def _infer_both_rnn(view: OperationView) -> Outputs:
    forward, backward = view.dims("w_fw")[0], view.dims("w_bw")[0]
    batch = _steps_and_batch(view)[1]
    return _bidirectional_outputs(view, forward, backward, [(batch, forward), (batch, backward)])


def _infer_svdf(view: OperationView) -> Outputs:
    """Infer the outputs of SVDF: the state of all filters, and a value for each unit."""
    (batch, _), rank = view.dims("x"), view.integer("rank", least=1)
    filters, memory = view.dims("w_time")
    if filters % rank:
        raise InvalidArgument(f"{filters} filters are no multiple of the rank {rank}")
    return like_data(view, (batch, memory * filters), (batch, filters // rank))


_Q16S, _Q8, _Q8S = (
    OperandType.TENSOR_QUANT16_SYMM,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
)


def _infer_quantized_16bit_lstm(view: OperationView) -> Outputs:
    """Infer the outputs: the cell state, whose scale is 2**-11, and the output in -1 … 1."""
    shape = view.dims("prev_out")
    return OutputSpec(_Q16S, shape, 2.0**-11, 0), OutputSpec(_Q8, shape, 1 / 128, 128)


def _infer_quantized_lstm(view: OperationView) -> Outputs:
    out, cell = view.dims("prev_out"), view.operand("prev_cell")
    before = view.operand("prev_out")
    _check_gates(view, "")
    return (
        OutputSpec(_Q8S, out, before.scale, before.zero_point),
        OutputSpec(_Q16S, view.dims("prev_cell"), cell.scale, 0),
        OutputSpec(_Q8S, out, before.scale, before.zero_point),
    )


_AUX = "aux:T? " + " ".join(_gates("aux_w", "T", "*", suffix) for suffix in ("_fw", "_bw"))
_STATES = "prev_out:T prev_cell:T"
_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.BIDIRECTIONAL_SEQUENCE_LSTM: signature(
        f"x/3:T {_lstm('_fw')} {_lstm('_bw')} prev_out_fw:T prev_cell_fw:T prev_out_bw:T prev_cell_bw:T {_AUX} "
        f"{_CLIPS} merge:bool time_major:bool {_gates('n', 'T', '*', '_fw')} {_gates('n', 'T', '*', '_bw')}",
        LATE_FLOAT,
        _infer_both_lstm,
        ["a:T [b:T]", "a:T s0:T@1.3 s1:T s2:T s3:T [s4:T]"],
    ),
    _O.BIDIRECTIONAL_SEQUENCE_RNN: signature(
        "x/3:T w_fw/2:T r_fw:T b_fw:T prev_fw:T w_bw/2:T r_bw:T b_bw:T prev_bw:T aux:T? aux_w_fw:T? aux_w_bw:T? "
        "activation:i32 time_major:bool merge:bool",
        LATE_FLOAT,
        _infer_both_rnn,
        ["a:T [b:T]", "a:T s0:T@1.3 s1:T [s2:T]"],
    ),
    _O.LSTM: signature(
        f"x/2:T {_lstm()} {_STATES} {_CLIPS} [n_in:T?@1.2 n_forget:T? n_cell:T? n_out:T?]",
        FLOAT,
        _infer_lstm,
        "scratch:T out_state:T cell_state:T out:T",
    ),
    _O.QUANTIZED_16BIT_LSTM: signature(
        f"x/2:T {_gates('w', 'Q8')} {_gates('r', 'Q8')} {_gates('b', 'I32')} prev_cell/2:Q16S prev_out/2:Q8",
        "Q8",
        _infer_quantized_16bit_lstm,
        "cell:Q16S out:Q8",
    ),
    _O.QUANTIZED_LSTM: signature(
        f"x/2:T {_gates('w', 'Q8Y', 'in')} {_gates('r', 'Q8Y', 'in')} "
        f"{_gates('p', 'Q16S', '*', '', ('in', 'forget', 'out'))} {_gates('b', 'I32', 'in')} proj:Q8Y? proj_bias:I32? "
        f"prev_out/2:Q8S prev_cell/2:Q16S {_gates('n', 'Q16S', '*')} cell_clip:f32? proj_clip:f32? "
        f"{_gates('scale', 'f32')} hidden_zero_point:i32 hidden_scale:f32",
        "Q8S",
        _infer_quantized_lstm,
        "out_state:Q8S cell:Q16S out:Q8S",
    ),
    _O.RNN: signature("x/2:T w/2:T r:T b:T prev:T activation:i32", FLOAT, _infer_rnn, "state:T out:T"),
    _O.SVDF: signature(
        "x/2:T w_feature/2:T w_time/2:T b:T? prev:T rank:i32 activation:i32", FLOAT, _infer_svdf, "state:T out:T"
    ),
    _O.UNIDIRECTIONAL_SEQUENCE_LSTM: signature(
        f"x/3:T {_lstm()} {_STATES} {_CLIPS} time_major:bool {_gates('n', 'T', '*')}",
        LATE_FLOAT,
        _infer_sequence_lstm,
        "out:T [out_state:T@1.3 cell_state:T]",
    ),
    _O.UNIDIRECTIONAL_SEQUENCE_RNN: signature(
        "x/3:T w/2:T r:T b:T prev:T activation:i32 time_major:i32",
        LATE_FLOAT,
        _infer_sequence_rnn,
        "out:T [state:T@1.3]",
    ),
}
