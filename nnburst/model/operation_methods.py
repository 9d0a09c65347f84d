"""Methods of `ModelBuilder`, one for each row of the operation table: `b.mean(x, [1, 2])`.

`make tables` (docs/operation_methods.py) generates this module. A method's arguments are the inputs in the operation's
row, by name. A tensor is an operand, an array, a list or a number. The row determines the type of a number for a scalar
input. None omits an input that can be omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .._options import ActivationName
from .operand import Operand, Output, Outputs, Value
from .operation_types import OperationType as O

if TYPE_CHECKING:
    from typing import Unpack

Int = int | Operand
Float = float | Operand
Bool = bool | Operand
Maybe = Value | None


class OperationMethods:
    """The methods of `ModelBuilder` that are generated from the operation table."""

    _one: Callable[..., Operand]
    _several: Callable[..., tuple[Operand, ...]]

    def add(self, a: Value, b: Value, activation: ActivationName | None = None, **output: Unpack[Output]) -> Operand:
        """Add the operation ADD."""
        return self._one(O.ADD, output, a, b, activation)

    def concatenation(self, x: Sequence[Value], axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation CONCATENATION."""
        return self._one(O.CONCATENATION, output, x, axis)

    def depth_to_space(self, x: Value, block: Int, nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation DEPTH_TO_SPACE."""
        return self._one(O.DEPTH_TO_SPACE, output, x, block, nchw)

    def dequantize(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation DEQUANTIZE."""
        return self._one(O.DEQUANTIZE, output, x)

    def embedding_lookup(self, lookups: Value, values: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation EMBEDDING_LOOKUP."""
        return self._one(O.EMBEDDING_LOOKUP, output, lookups, values)

    def floor(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation FLOOR."""
        return self._one(O.FLOOR, output, x)

    def hashtable_lookup(self, lookups: Value, keys: Value, values: Value, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation HASHTABLE_LOOKUP."""
        return self._several(O.HASHTABLE_LOOKUP, outputs, lookups, keys, values)

    def l2_normalization(self, x: Value, axis: Int = -1, **output: Unpack[Output]) -> Operand:
        """Add the operation L2_NORMALIZATION."""
        return self._one(O.L2_NORMALIZATION, output, x, axis)

    def local_response_normalization(self, x: Value, radius: Int, bias: Float, alpha: Float, beta: Float,
            axis: Int = -1, **output: Unpack[Output]) -> Operand:
        """Add the operation LOCAL_RESPONSE_NORMALIZATION."""
        return self._one(O.LOCAL_RESPONSE_NORMALIZATION, output, x, radius, bias, alpha, beta, axis)

    def logistic(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LOGISTIC."""
        return self._one(O.LOGISTIC, output, x)

    def lsh_projection(self, hash: Value, input: Value, *, weight: Maybe = None, kind: Int,
            **output: Unpack[Output]) -> Operand:
        """Add the operation LSH_PROJECTION."""
        return self._one(O.LSH_PROJECTION, output, hash, input, weight, kind)

    def lstm(self, x: Value, *, w_in: Maybe = None, w_forget: Value, w_cell: Value, w_out: Value, r_in: Maybe = None,
            r_forget: Value, r_cell: Value, r_out: Value, p_in: Maybe = None, p_forget: Maybe = None,
            p_out: Maybe = None, b_in: Maybe = None, b_forget: Value, b_cell: Value, b_out: Value, proj: Maybe = None,
            proj_bias: Maybe = None, prev_out: Value, prev_cell: Value, activation: Int, cell_clip: Float = 0.0,
            proj_clip: Float = 0.0, n_in: Maybe = None, n_forget: Maybe = None, n_cell: Maybe = None,
            n_out: Maybe = None, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation LSTM."""
        return self._several(O.LSTM, outputs, x, w_in, w_forget, w_cell, w_out, r_in, r_forget, r_cell, r_out, p_in,
                p_forget, p_out, b_in, b_forget, b_cell, b_out, proj, proj_bias, prev_out, prev_cell, activation,
                cell_clip, proj_clip, n_in, n_forget, n_cell, n_out)

    def mul(self, a: Value, b: Value, activation: ActivationName | None = None, **output: Unpack[Output]) -> Operand:
        """Add the operation MUL."""
        return self._one(O.MUL, output, a, b, activation)

    def relu(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RELU."""
        return self._one(O.RELU, output, x)

    def relu1(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RELU1."""
        return self._one(O.RELU1, output, x)

    def relu6(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RELU6."""
        return self._one(O.RELU6, output, x)

    def reshape(self, x: Value, shape: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RESHAPE."""
        return self._one(O.RESHAPE, output, x, shape)

    def resize_bilinear(self, x: Value, width: Int, height: Int, nchw: Bool = False, align_corners: Bool = False,
            half_pixel: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation RESIZE_BILINEAR."""
        return self._one(O.RESIZE_BILINEAR, output, x, width, height, nchw, align_corners, half_pixel)

    def rnn(self, x: Value, w: Value, r: Value, b: Value, prev: Value, activation: Int, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation RNN."""
        return self._several(O.RNN, outputs, x, w, r, b, prev, activation)

    def space_to_depth(self, x: Value, block: Int, nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation SPACE_TO_DEPTH."""
        return self._one(O.SPACE_TO_DEPTH, output, x, block, nchw)

    def svdf(self, x: Value, w_feature: Value, w_time: Value, *, b: Maybe = None, prev: Value, rank: Int,
            activation: Int, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation SVDF."""
        return self._several(O.SVDF, outputs, x, w_feature, w_time, b, prev, rank, activation)

    def tanh(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation TANH."""
        return self._one(O.TANH, output, x)

    def batch_to_space_nd(self, x: Value, block: Value, nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation BATCH_TO_SPACE_ND."""
        return self._one(O.BATCH_TO_SPACE_ND, output, x, block, nchw)

    def div(self, a: Value, b: Value, activation: ActivationName | None = None, **output: Unpack[Output]) -> Operand:
        """Add the operation DIV."""
        return self._one(O.DIV, output, a, b, activation)

    def mean(self, x: Value, axes: Value, keep: Int = False, **output: Unpack[Output]) -> Operand:
        """Add the operation MEAN."""
        return self._one(O.MEAN, output, x, axes, keep)

    def pad(self, x: Value, pads: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation PAD."""
        return self._one(O.PAD, output, x, pads)

    def space_to_batch_nd(self, x: Value, block: Value, pads: Value, nchw: Bool = False,
            **output: Unpack[Output]) -> Operand:
        """Add the operation SPACE_TO_BATCH_ND."""
        return self._one(O.SPACE_TO_BATCH_ND, output, x, block, pads, nchw)

    def squeeze(self, x: Value, axes: Maybe = None, **output: Unpack[Output]) -> Operand:
        """Add the operation SQUEEZE."""
        return self._one(O.SQUEEZE, output, x, axes)

    def strided_slice(self, x: Value, begin: Value, end: Value, strides: Value, begin_mask: Int = 0, end_mask: Int = 0,
            shrink_mask: Int = 0, **output: Unpack[Output]) -> Operand:
        """Add the operation STRIDED_SLICE."""
        return self._one(O.STRIDED_SLICE, output, x, begin, end, strides, begin_mask, end_mask, shrink_mask)

    def sub(self, a: Value, b: Value, activation: ActivationName | None = None, **output: Unpack[Output]) -> Operand:
        """Add the operation SUB."""
        return self._one(O.SUB, output, a, b, activation)

    def transpose(self, x: Value, perm: Maybe = None, **output: Unpack[Output]) -> Operand:
        """Add the operation TRANSPOSE."""
        return self._one(O.TRANSPOSE, output, x, perm)

    def abs(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation ABS."""
        return self._one(O.ABS, output, x)

    def argmax(self, x: Value, axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation ARGMAX."""
        return self._one(O.ARGMAX, output, x, axis)

    def argmin(self, x: Value, axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation ARGMIN."""
        return self._one(O.ARGMIN, output, x, axis)

    def axis_aligned_bbox_transform(self, roi: Value, delta: Value, batch: Value, image: Value,
            **output: Unpack[Output]) -> Operand:
        """Add the operation AXIS_ALIGNED_BBOX_TRANSFORM."""
        return self._one(O.AXIS_ALIGNED_BBOX_TRANSFORM, output, roi, delta, batch, image)

    def bidirectional_sequence_lstm(self, x: Value, *, w_in_fw: Maybe = None, w_forget_fw: Value, w_cell_fw: Value,
            w_out_fw: Value, r_in_fw: Maybe = None, r_forget_fw: Value, r_cell_fw: Value, r_out_fw: Value,
            p_in_fw: Maybe = None, p_forget_fw: Maybe = None, p_out_fw: Maybe = None, b_in_fw: Maybe = None,
            b_forget_fw: Value, b_cell_fw: Value, b_out_fw: Value, proj_fw: Maybe = None, proj_bias_fw: Maybe = None,
            w_in_bw: Maybe = None, w_forget_bw: Value, w_cell_bw: Value, w_out_bw: Value, r_in_bw: Maybe = None,
            r_forget_bw: Value, r_cell_bw: Value, r_out_bw: Value, p_in_bw: Maybe = None, p_forget_bw: Maybe = None,
            p_out_bw: Maybe = None, b_in_bw: Maybe = None, b_forget_bw: Value, b_cell_bw: Value, b_out_bw: Value,
            proj_bw: Maybe = None, proj_bias_bw: Maybe = None, prev_out_fw: Value, prev_cell_fw: Value,
            prev_out_bw: Value, prev_cell_bw: Value, aux: Maybe = None, aux_w_in_fw: Maybe = None,
            aux_w_forget_fw: Maybe = None, aux_w_cell_fw: Maybe = None, aux_w_out_fw: Maybe = None,
            aux_w_in_bw: Maybe = None, aux_w_forget_bw: Maybe = None, aux_w_cell_bw: Maybe = None,
            aux_w_out_bw: Maybe = None, activation: Int, cell_clip: Float = 0.0, proj_clip: Float = 0.0,
            merge: Bool = False, time_major: Bool = False, n_in_fw: Maybe = None, n_forget_fw: Maybe = None,
            n_cell_fw: Maybe = None, n_out_fw: Maybe = None, n_in_bw: Maybe = None, n_forget_bw: Maybe = None,
            n_cell_bw: Maybe = None, n_out_bw: Maybe = None, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation BIDIRECTIONAL_SEQUENCE_LSTM."""
        return self._several(O.BIDIRECTIONAL_SEQUENCE_LSTM, outputs, x, w_in_fw, w_forget_fw, w_cell_fw, w_out_fw,
                r_in_fw, r_forget_fw, r_cell_fw, r_out_fw, p_in_fw, p_forget_fw, p_out_fw, b_in_fw, b_forget_fw,
                b_cell_fw, b_out_fw, proj_fw, proj_bias_fw, w_in_bw, w_forget_bw, w_cell_bw, w_out_bw, r_in_bw,
                r_forget_bw, r_cell_bw, r_out_bw, p_in_bw, p_forget_bw, p_out_bw, b_in_bw, b_forget_bw, b_cell_bw,
                b_out_bw, proj_bw, proj_bias_bw, prev_out_fw, prev_cell_fw, prev_out_bw, prev_cell_bw, aux,
                aux_w_in_fw, aux_w_forget_fw, aux_w_cell_fw, aux_w_out_fw, aux_w_in_bw, aux_w_forget_bw, aux_w_cell_bw,
                aux_w_out_bw, activation, cell_clip, proj_clip, merge, time_major, n_in_fw, n_forget_fw, n_cell_fw,
                n_out_fw, n_in_bw, n_forget_bw, n_cell_bw, n_out_bw)

    def bidirectional_sequence_rnn(self, x: Value, w_fw: Value, r_fw: Value, b_fw: Value, prev_fw: Value, w_bw: Value,
            r_bw: Value, b_bw: Value, prev_bw: Value, *, aux: Maybe = None, aux_w_fw: Maybe = None,
            aux_w_bw: Maybe = None, activation: Int, time_major: Bool = False, merge: Bool = False,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation BIDIRECTIONAL_SEQUENCE_RNN."""
        return self._several(O.BIDIRECTIONAL_SEQUENCE_RNN, outputs, x, w_fw, r_fw, b_fw, prev_fw, w_bw, r_bw, b_bw,
                prev_bw, aux, aux_w_fw, aux_w_bw, activation, time_major, merge)

    def box_with_nms_limit(self, scores: Value, boxes: Value, batch: Value, score_threshold: Float, max_boxes: Int,
            kernel: Int, iou_threshold: Float, sigma: Float, nms_threshold: Float, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation BOX_WITH_NMS_LIMIT."""
        return self._several(O.BOX_WITH_NMS_LIMIT, outputs, scores, boxes, batch, score_threshold, max_boxes, kernel,
                iou_threshold, sigma, nms_threshold)

    def cast(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation CAST."""
        return self._one(O.CAST, output, x)

    def channel_shuffle(self, x: Value, groups: Int, axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation CHANNEL_SHUFFLE."""
        return self._one(O.CHANNEL_SHUFFLE, output, x, groups, axis)

    def detection_postprocessing(self, scores: Value, deltas: Value, anchors: Value, scale_y: Float, scale_x: Float,
            scale_h: Float, scale_w: Float, regular: Bool, max_detections: Int, max_classes: Int, max_per_class: Int,
            score_threshold: Float, iou_threshold: Float, background: Bool, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation DETECTION_POSTPROCESSING."""
        return self._several(O.DETECTION_POSTPROCESSING, outputs, scores, deltas, anchors, scale_y, scale_x, scale_h,
                scale_w, regular, max_detections, max_classes, max_per_class, score_threshold, iou_threshold,
                background)

    def equal(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation EQUAL."""
        return self._one(O.EQUAL, output, a, b)

    def exp(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation EXP."""
        return self._one(O.EXP, output, x)

    def expand_dims(self, x: Value, axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation EXPAND_DIMS."""
        return self._one(O.EXPAND_DIMS, output, x, axis)

    def gather(self, x: Value, axis: Int, indices: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation GATHER."""
        return self._one(O.GATHER, output, x, axis, indices)

    def generate_proposals(self, scores: Value, deltas: Value, anchors: Value, image: Value, ratio_h: Float,
            ratio_w: Float, pre_nms: Int, post_nms: Int, iou_threshold: Float, min_size: Float, nchw: Bool = False, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation GENERATE_PROPOSALS."""
        return self._several(O.GENERATE_PROPOSALS, outputs, scores, deltas, anchors, image, ratio_h, ratio_w, pre_nms,
                post_nms, iou_threshold, min_size, nchw)

    def greater(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation GREATER."""
        return self._one(O.GREATER, output, a, b)

    def greater_equal(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation GREATER_EQUAL."""
        return self._one(O.GREATER_EQUAL, output, a, b)

    def grouped_conv_2d(self, x: Value, filter: Value, bias: Value, pad_left: Int, pad_right: Int, pad_top: Int,
            pad_bottom: Int, stride_w: Int, stride_h: Int, groups: Int, activation: ActivationName | None = None,
            nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation GROUPED_CONV_2D."""
        return self._one(O.GROUPED_CONV_2D, output, x, filter, bias, pad_left, pad_right, pad_top, pad_bottom,
                stride_w, stride_h, groups, activation, nchw)

    def heatmap_max_keypoint(self, x: Value, boxes: Value, nchw: Bool = False, *,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation HEATMAP_MAX_KEYPOINT."""
        return self._several(O.HEATMAP_MAX_KEYPOINT, outputs, x, boxes, nchw)

    def instance_normalization(self, x: Value, gamma: Float, beta: Float, epsilon: Float, nchw: Bool = False,
            **output: Unpack[Output]) -> Operand:
        """Add the operation INSTANCE_NORMALIZATION."""
        return self._one(O.INSTANCE_NORMALIZATION, output, x, gamma, beta, epsilon, nchw)

    def less(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LESS."""
        return self._one(O.LESS, output, a, b)

    def less_equal(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LESS_EQUAL."""
        return self._one(O.LESS_EQUAL, output, a, b)

    def log(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LOG."""
        return self._one(O.LOG, output, x)

    def logical_and(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LOGICAL_AND."""
        return self._one(O.LOGICAL_AND, output, a, b)

    def logical_not(self, a: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LOGICAL_NOT."""
        return self._one(O.LOGICAL_NOT, output, a)

    def logical_or(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation LOGICAL_OR."""
        return self._one(O.LOGICAL_OR, output, a, b)

    def log_softmax(self, x: Value, beta: Float, axis: Int, **output: Unpack[Output]) -> Operand:
        """Add the operation LOG_SOFTMAX."""
        return self._one(O.LOG_SOFTMAX, output, x, beta, axis)

    def maximum(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation MAXIMUM."""
        return self._one(O.MAXIMUM, output, a, b)

    def minimum(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation MINIMUM."""
        return self._one(O.MINIMUM, output, a, b)

    def neg(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation NEG."""
        return self._one(O.NEG, output, x)

    def not_equal(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation NOT_EQUAL."""
        return self._one(O.NOT_EQUAL, output, a, b)

    def pad_v2(self, x: Value, pads: Value, value: Float, **output: Unpack[Output]) -> Operand:
        """Add the operation PAD_V2."""
        return self._one(O.PAD_V2, output, x, pads, value)

    def pow(self, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation POW."""
        return self._one(O.POW, output, a, b)

    def prelu(self, x: Value, alpha: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation PRELU."""
        return self._one(O.PRELU, output, x, alpha)

    def quantize(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation QUANTIZE."""
        return self._one(O.QUANTIZE, output, x)

    def quantized_16bit_lstm(self, x: Value, w_in: Value, w_forget: Value, w_cell: Value, w_out: Value, r_in: Value,
            r_forget: Value, r_cell: Value, r_out: Value, b_in: Value, b_forget: Value, b_cell: Value, b_out: Value,
            prev_cell: Value, prev_out: Value, *, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation QUANTIZED_16BIT_LSTM."""
        return self._several(O.QUANTIZED_16BIT_LSTM, outputs, x, w_in, w_forget, w_cell, w_out, r_in, r_forget, r_cell,
                r_out, b_in, b_forget, b_cell, b_out, prev_cell, prev_out)

    def random_multinomial(self, logits: Value, samples: Int, seeds: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RANDOM_MULTINOMIAL."""
        return self._one(O.RANDOM_MULTINOMIAL, output, logits, samples, seeds)

    def reduce_all(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_ALL."""
        return self._one(O.REDUCE_ALL, output, x, axes, keep)

    def reduce_any(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_ANY."""
        return self._one(O.REDUCE_ANY, output, x, axes, keep)

    def reduce_max(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_MAX."""
        return self._one(O.REDUCE_MAX, output, x, axes, keep)

    def reduce_min(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_MIN."""
        return self._one(O.REDUCE_MIN, output, x, axes, keep)

    def reduce_prod(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_PROD."""
        return self._one(O.REDUCE_PROD, output, x, axes, keep)

    def reduce_sum(self, x: Value, axes: Value, keep: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation REDUCE_SUM."""
        return self._one(O.REDUCE_SUM, output, x, axes, keep)

    def roi_align(self, x: Value, roi: Value, batch: Value, out_h: Int, out_w: Int, ratio_h: Float, ratio_w: Float,
            samples_h: Int, samples_w: Int, nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation ROI_ALIGN."""
        return self._one(O.ROI_ALIGN, output, x, roi, batch, out_h, out_w, ratio_h, ratio_w, samples_h, samples_w,
                nchw)

    def roi_pooling(self, x: Value, roi: Value, batch: Value, out_h: Int, out_w: Int, ratio_h: Float, ratio_w: Float,
            nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation ROI_POOLING."""
        return self._one(O.ROI_POOLING, output, x, roi, batch, out_h, out_w, ratio_h, ratio_w, nchw)

    def rsqrt(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RSQRT."""
        return self._one(O.RSQRT, output, x)

    def select(self, cond: Value, a: Value, b: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation SELECT."""
        return self._one(O.SELECT, output, cond, a, b)

    def sin(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation SIN."""
        return self._one(O.SIN, output, x)

    def slice(self, x: Value, begin: Value, size: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation SLICE."""
        return self._one(O.SLICE, output, x, begin, size)

    def split(self, x: Value, axis: Int, parts: Int, *, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation SPLIT."""
        return self._several(O.SPLIT, outputs, x, axis, parts)

    def sqrt(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation SQRT."""
        return self._one(O.SQRT, output, x)

    def tile(self, x: Value, multiples: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation TILE."""
        return self._one(O.TILE, output, x, multiples)

    def topk_v2(self, x: Value, k: Int, *, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation TOPK_V2."""
        return self._several(O.TOPK_V2, outputs, x, k)

    def transpose_conv_2d(self, x: Value, filter: Value, bias: Value, pad_left: Int, pad_right: Int, pad_top: Int,
            pad_bottom: Int, stride_w: Int, stride_h: Int, activation: ActivationName | None = None,
            nchw: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation TRANSPOSE_CONV_2D."""
        return self._one(O.TRANSPOSE_CONV_2D, output, x, filter, bias, pad_left, pad_right, pad_top, pad_bottom,
                stride_w, stride_h, activation, nchw)

    def unidirectional_sequence_lstm(self, x: Value, *, w_in: Maybe = None, w_forget: Value, w_cell: Value,
            w_out: Value, r_in: Maybe = None, r_forget: Value, r_cell: Value, r_out: Value, p_in: Maybe = None,
            p_forget: Maybe = None, p_out: Maybe = None, b_in: Maybe = None, b_forget: Value, b_cell: Value,
            b_out: Value, proj: Maybe = None, proj_bias: Maybe = None, prev_out: Value, prev_cell: Value,
            activation: Int, cell_clip: Float = 0.0, proj_clip: Float = 0.0, time_major: Bool = False,
            n_in: Maybe = None, n_forget: Maybe = None, n_cell: Maybe = None, n_out: Maybe = None,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation UNIDIRECTIONAL_SEQUENCE_LSTM."""
        return self._several(O.UNIDIRECTIONAL_SEQUENCE_LSTM, outputs, x, w_in, w_forget, w_cell, w_out, r_in, r_forget,
                r_cell, r_out, p_in, p_forget, p_out, b_in, b_forget, b_cell, b_out, proj, proj_bias, prev_out,
                prev_cell, activation, cell_clip, proj_clip, time_major, n_in, n_forget, n_cell, n_out)

    def unidirectional_sequence_rnn(self, x: Value, w: Value, r: Value, b: Value, prev: Value, activation: Int,
            time_major: Int = False, *, outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation UNIDIRECTIONAL_SEQUENCE_RNN."""
        return self._several(O.UNIDIRECTIONAL_SEQUENCE_RNN, outputs, x, w, r, b, prev, activation, time_major)

    def resize_nearest_neighbor(self, x: Value, width: Int, height: Int, nchw: Bool = False,
            align_corners: Bool = False, half_pixel: Bool = False, **output: Unpack[Output]) -> Operand:
        """Add the operation RESIZE_NEAREST_NEIGHBOR."""
        return self._one(O.RESIZE_NEAREST_NEIGHBOR, output, x, width, height, nchw, align_corners, half_pixel)

    def quantized_lstm(self, x: Value, *, w_in: Maybe = None, w_forget: Value, w_cell: Value, w_out: Value,
            r_in: Maybe = None, r_forget: Value, r_cell: Value, r_out: Value, p_in: Maybe = None,
            p_forget: Maybe = None, p_out: Maybe = None, b_in: Maybe = None, b_forget: Value, b_cell: Value,
            b_out: Value, proj: Maybe = None, proj_bias: Maybe = None, prev_out: Value, prev_cell: Value,
            n_in: Maybe = None, n_forget: Maybe = None, n_cell: Maybe = None, n_out: Maybe = None,
            cell_clip: Maybe = None, proj_clip: Maybe = None, scale_in: Float, scale_forget: Float, scale_cell: Float,
            scale_out: Float, hidden_zero_point: Int, hidden_scale: Float,
            outputs: Outputs = None) -> tuple[Operand, ...]:
        """Add the operation QUANTIZED_LSTM."""
        return self._several(O.QUANTIZED_LSTM, outputs, x, w_in, w_forget, w_cell, w_out, r_in, r_forget, r_cell,
                r_out, p_in, p_forget, p_out, b_in, b_forget, b_cell, b_out, proj, proj_bias, prev_out, prev_cell,
                n_in, n_forget, n_cell, n_out, cell_clip, proj_clip, scale_in, scale_forget, scale_cell, scale_out,
                hidden_zero_point, hidden_scale)

    def elu(self, x: Value, alpha: Float, **output: Unpack[Output]) -> Operand:
        """Add the operation ELU."""
        return self._one(O.ELU, output, x, alpha)

    def hard_swish(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation HARD_SWISH."""
        return self._one(O.HARD_SWISH, output, x)

    def fill(self, dims: Value, value: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation FILL."""
        return self._one(O.FILL, output, dims, value)

    def rank(self, x: Value, **output: Unpack[Output]) -> Operand:
        """Add the operation RANK."""
        return self._one(O.RANK, output, x)
