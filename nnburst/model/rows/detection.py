"""The operation table, part: object detection. Quantised boxes are in eighths of a pixel."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from ..window import image_dims
from .common import I32, LATE_FLOAT, LATE_FLOAT_QUANT8, Outputs, like_data, require_equal

_EIGHTHS = (OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM)


def _check_eighths(view: OperationView) -> None:
    """Check that 16-bit coordinates have the scale 1/8 and the zero point 0."""
    names = [name for name in view.match.positions if view.operand(name).type in _EIGHTHS]
    found = [(name, view.operand(name)) for name in names]
    found += [
        (f"output {i}", operand)
        for i in range(len(view.operation.outputs))
        if (operand := view.output(i)).type in _EIGHTHS
    ]
    for name, operand in found:
        if operand.scale != 0.125 or operand.zero_point != 0:
            raise InvalidArgument(
                f"{name} has scale {operand.scale:g} and zero point {operand.zero_point}; they must be 0.125 and 0"
            )


def box_type(data_type: OperandType) -> OperandType:
    quantised = data_type in (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
    return OperandType.TENSOR_QUANT16_ASYMM if quantised else data_type


def _boxes(view: OperationView, dims: tuple[int, ...]) -> OutputSpec:
    kind = box_type(view.data_type)
    return OutputSpec(kind, dims, *((0.125, 0) if kind is not view.data_type else (None, None)))


def _require_four(view: OperationView, name: str) -> tuple[int, ...]:
    dims = view.dims(name)
    require_equal(f"the last dimension of {name}", dims[-1], 4, view.partial)
    return dims


def _infer_transform(view: OperationView) -> Outputs:
    regions, deltas = _require_four(view, "roi"), view.dims("delta")
    require_equal("the number of deltas", deltas[0], regions[0], view.partial)
    require_equal("the number of batch indexes", view.dims("batch")[0], regions[0], view.partial)
    if deltas[1] % 4:
        raise InvalidArgument(f"delta has {deltas[1]} columns, which is no multiple of 4")
    scale, zero_point = (view.operand("roi").scale, 0) if view.info.is_quantised else (None, None)
    return (OutputSpec(view.data_type, deltas, scale, zero_point),)


def _infer_nms(view: OperationView) -> Outputs:
    """Infer the output shapes of BOX_WITH_NMS_LIMIT. The number of boxes is 0 (unknown): only a run finds it."""
    scores, boxes = view.dims("scores"), view.dims("boxes")
    require_equal("the number of columns of boxes", boxes[1], 4 * scores[1], view.partial)
    require_equal("the number of boxes", boxes[0], scores[0], view.partial)
    if view.integer("kernel") not in (0, 1, 2):
        raise InvalidArgument(f"kernel is {view.integer('kernel')}; it must be 0 (hard), 1 (linear) or 2 (gaussian)")
    few = OutputSpec(I32, (0,))
    return (*like_data(view, (0,)), _boxes(view, (0, 4)), few, few)


def _infer_proposals(view: OperationView) -> Outputs:
    require_equal(
        "the number of anchors",
        _require_four(view, "anchors")[0],
        view.dims("scores")[1 if view.integer("nchw") else 3],
        view.partial,
    )
    return (*like_data(view, (0,)), _boxes(view, (0, 4)), OutputSpec(I32, (0,)))


def _infer_postprocessing(view: OperationView) -> Outputs:
    batch, most = view.dims("scores")[0], view.integer("max_detections", least=1)
    shapes = ((batch, most), (batch, most, 4))
    return (*like_data(view, *shapes), OutputSpec(I32, (batch, most)), OutputSpec(I32, (batch,)))


def _infer_keypoints(view: OperationView) -> Outputs:
    boxes, height, width, points, _ = image_dims(view)
    require_equal("the number of boxes", _require_four(view, "boxes")[0], boxes, view.partial)
    require_equal("the width of a heat map", width, height, view.partial)
    if height == 1:
        raise InvalidArgument("a heat map of 1 x 1 has no key point; its side must be 2 or more")
    return (*like_data(view, (boxes, points)), _boxes(view, (boxes, points, 2)))


def _infer_regions(view: OperationView) -> Outputs:
    *_, channels, nchw = image_dims(view)
    height, width = view.integer("out_h", least=1), view.integer("out_w", least=1)
    for name in ("ratio_h", "ratio_w"):
        if not view.number(name) > 0:
            raise InvalidArgument(f"{name} is {view.number(name):g}; it must be positive")
    for name in ("samples_h", "samples_w"):
        view.integer(name, 0, least=0)
    count = _require_four(view, "roi")[0]
    require_equal("the number of batch indexes", view.dims("batch")[0], count, view.partial)
    return like_data(view, (count, channels, height, width) if nchw else (count, height, width, channels))


def _regions(samples: str, outputs: str = "out:T") -> Signature:
    form = f"x/4:T roi/2:box batch/1:I32 out_h:i32 out_w:i32 ratio_h:fx ratio_w:fx {samples} nchw:bool"
    return signature(form, LATE_FLOAT_QUANT8, _infer_regions, outputs, check=_check_eighths, zero_sized=True)


_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.AXIS_ALIGNED_BBOX_TRANSFORM: signature(
        "roi/2:T delta/2:delta batch/1:I32 image/2:T",
        LATE_FLOAT + " Q16A",
        _infer_transform,
        check=_check_eighths,
        zero_sized=True,
    ),
    _O.BOX_WITH_NMS_LIMIT: signature(
        "scores/2:T boxes/2:box batch/1:I32 score_threshold:fx max_boxes:i32 kernel:i32 iou_threshold:fx sigma:fx "
        "nms_threshold:fx",
        LATE_FLOAT_QUANT8,
        _infer_nms,
        "out_scores:T=scores out_boxes:box classes:I32 out_batch:I32",
        check=_check_eighths,
        zero_sized=True,
        measured=True,
    ),
    _O.DETECTION_POSTPROCESSING: signature(
        "scores/3:T deltas/3:T anchors/2:T scale_y:fx scale_x:fx scale_h:fx scale_w:fx regular:bool max_detections:i32 "
        "max_classes:i32 max_per_class:i32 score_threshold:fx iou_threshold:fx background:bool",
        LATE_FLOAT,
        _infer_postprocessing,
        "out_scores:T out_boxes:T classes:I32 counts:I32",
    ),
    _O.GENERATE_PROPOSALS: signature(
        "scores/4:T deltas/4:T anchors/2:anchor image/2:box ratio_h:fx ratio_w:fx pre_nms:i32 post_nms:i32 "
        "iou_threshold:fx min_size:fx nchw:bool",
        LATE_FLOAT_QUANT8,
        _infer_proposals,
        "out_scores:T=scores out_boxes:box out_batch:I32",
        check=_check_eighths,
        zero_sized=True,
        measured=True,
    ),
    _O.HEATMAP_MAX_KEYPOINT: signature(
        "x/4:T boxes/2:box nchw:bool",
        LATE_FLOAT_QUANT8,
        _infer_keypoints,
        "out_scores:T points:box",
        check=_check_eighths,
    ),
    _O.ROI_ALIGN: _regions("samples_h:i32 samples_w:i32"),
    _O.ROI_POOLING: _regions("", "out:T=x"),
}
