"""Operators of ONNX Runtime with dimensions of 0: what of their results depends on what memory held before.

``python onnx_zero_sized.py OUT PATTERN TRIES`` runs cases, as the device would, and writes a line for each before
it begins and one of what came out, as a digest. Run twice under different values of ``MALLOC_PERTURB_``, which is
what fresh memory holds, the lines are the same if all that is handed out was written. The cases are ONNX's own for its
nodes, with sizes replaced by 0, and guesses at all operators that ONNX Runtime has.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

Array = np.ndarray[Any, np.dtype[Any]]
Case = tuple[str, Any, list[dict[str, Array]]]
"""A name, a model, and what goes in each time."""

_MOST = 120
"""Ways to set sizes of one model to 0."""
_LONGEST_S = 3
"""Of processor time, for one run."""
_FLOAT = TensorProto.FLOAT


def _variants(arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the arrays with one, two or three of their axes cut to nothing, and with all axes of one size."""
    axes = [(name, axis) for name, array in arrays.items() for axis in range(array.ndim)]
    alike: dict[int, list[tuple[str, int]]] = {}
    for name, axis in axes:
        alike.setdefault(arrays[name].shape[axis], []).append((name, axis))
    several = [itertools.combinations(axes, n) for n in (2, 3)]
    chosen = itertools.chain(([one] for one in axes), alike.values(), [axes], *several)
    found = {frozenset(cut): None for cut in itertools.islice(chosen, _MOST)}

    def cut(name: str, axes: frozenset[tuple[str, int]]) -> Array:
        array = arrays[name]
        return np.zeros([0 if (name, axis) in axes else size for axis, size in enumerate(array.shape)], array.dtype)

    def kept(name: str, axes: frozenset[tuple[str, int]]) -> Array:
        return cut(name, axes) if any(name == other for other, _ in axes) else arrays[name]

    return [{name: kept(name, axes) for name in arrays} for axes in found]


def _opened(model: Any) -> Any:
    """Return the model without the shapes of its inputs and outputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in (*made.graph.input, *made.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return made


def computed(case: Case) -> Case:
    """Return a case whose inputs are computed: each is cut to its sizes in the model, where nothing has no memory."""
    name, model, variants = case
    made = onnx.ModelProto()
    made.CopyFrom(model)
    cuts = []
    for value in list(made.graph.input):
        if value.name in variants[0] and variants[0][value.name].ndim:
            whole = _like(value, f"{value.name}:whole")
            ends = helper.make_tensor_value_info(f"{value.name}:ends", TensorProto.INT64, (None,))
            starts = helper.make_node("Sub", [ends.name, ends.name], [f"{value.name}:starts"])
            cuts += [starts, helper.make_node("Slice", [whole.name, starts.output[0], ends.name], [value.name])]
            made.graph.input.remove(value)
            made.graph.input.extend([whole, ends])
    nodes = [*cuts, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for opset in made.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, 14)

    def whole_of(arrays: Mapping[str, Array]) -> dict[str, Array]:
        given: dict[str, Array] = {}
        for name, array in arrays.items():
            if array.ndim:
                given[f"{name}:whole"] = array if array.size else np.ones([max(n, 1) for n in array.shape], array.dtype)
                given[f"{name}:ends"] = np.array(array.shape, np.int64)
            else:
                given[name] = array
        return given

    return f"computed:{name}", made, list(map(whole_of, variants))


def _own_cases() -> Iterator[Case]:
    """Yield ONNX's cases for its operators."""
    import onnx.backend.test.loader as loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = loader.load_model_tests(kind="node")
    for case in found:
        if case.model is None:
            continue
        arrays = dict(zip([value.name for value in case.model.graph.input], case.data_sets[0][0], strict=False))
        if all(isinstance(array, np.ndarray) and array.dtype.kind in "fiub" for array in arrays.values()):
            operators = sorted({node.op_type for node in case.model.graph.node})
            yield f"{case.name[len('test_') :]}:{'+'.join(operators[:4])}", _opened(case.model), _variants(arrays)


def made(nodes: list[Any], arrays: Mapping[str, Array], outputs: list[str], functions: list[Any] | None = None) -> Any:
    """Return a model whose inputs have open ranks."""
    kind = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        nodes,
        "zero sized",
        [helper.make_tensor_value_info(name, kind(array.dtype), None) for name, array in arrays.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    opsets = [helper.make_opsetid(*row) for row in (("", 17), ("com.microsoft", 1), ("own", 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions or [])


def _nested_cases() -> Iterator[Case]:
    """Yield the operators of which it is known, in functions and control flow, and some that ONNX has no cases of."""
    node, u8, f4 = helper.make_node, np.uint8, np.float32
    matrices = {"a": np.ones((2, 4), u8), "b": np.ones((4, 3), u8)}
    parts = {"a": np.ones((2, 3), f4), "b": np.ones((2, 5), f4)}
    images = {"a": np.ones((1, 2, 4, 4), u8), "b": np.ones((3, 2, 3, 3), u8)}
    scalars = {"s": np.array(0.5, f4), "z": np.array(3, u8)}
    none = {"i": np.ones((), np.int64), "c": np.ones((), np.bool_)}
    join, product = node("Concat", ["a", "b"], ["y"], axis=1), node("MatMulInteger", ["a", "b"], ["y"])
    convolution = node("ConvInteger", ["a", "b"], ["y"])
    quantised = node("QLinearMatMul", ["a", "s", "z", "b", "s", "z", "s", "z"], ["y"])
    simple = [("Concat", join, parts), ("MatMulInteger", product, matrices), ("ConvInteger", convolution, images)]
    for name, inner, arrays in (*simple, ("QLinearMatMul", quantised, matrices | scalars)):
        yield f"plain:{name}", made([inner], arrays, ["y"]), _variants(arrays)
        kind = TensorProto.FLOAT if name == "Concat" else TensorProto.UINT8 if name[0] == "Q" else TensorProto.INT32
        out = [helper.make_tensor_value_info("y", kind, None)]
        branch = helper.make_graph([inner], "branch", [], out)
        chosen = node("If", ["c"], ["r"], then_branch=branch, else_branch=branch)
        yield f"in_if:{name}", made([chosen], arrays | {"c": none["c"]}, ["r"]), _variants(arrays | {"c": none["c"]})
        kept = helper.make_tensor_value_info("go", TensorProto.BOOL, ())
        going = [helper.make_tensor_value_info("n", TensorProto.INT64, ()), kept]
        body = helper.make_graph([inner, node("Identity", ["go"], ["on"])], "body", going, [_like(kept, "on"), *out])
        loop = node("Loop", ["i", "c"], ["r"], body=body)
        yield f"in_loop:{name}", made([loop], arrays | none, ["r"]), _variants(arrays | none)
        opset = [helper.make_opsetid("", 17)]
        function = helper.make_function("own", "f", list(arrays), ["y"], [inner], opset)
        call = node("f", list(arrays), ["r"], domain="own")
        yield f"in_function:{name}", made([call], arrays, ["r"], [function]), _variants(arrays)
    added = {
        "MatMulIntegerToFloat": (["a", "b", "s", "s"], matrices),
        "DynamicQuantizeMatMul": (["x", "b", "s"], {"x": np.ones((2, 4), f4), "b": matrices["b"]}),
        "QGemm": (["a", "s", "z", "b", "s", "z"], matrices),
    }
    for name, (inputs, arrays) in added.items():
        arrays = {key: value for key, value in (arrays | scalars).items() if key in inputs}
        yield (
            f"added:{name}",
            made([node(name, inputs, ["y"], domain="com.microsoft")], arrays, ["y"]),
            _variants(arrays),
        )
    bytes_ = {name: array.astype(u8) for name, array in parts.items()} | scalars
    joined = node("QLinearConcat", ["s", "z", "a", "s", "z", "b", "s", "z"], ["y"], domain="com.microsoft", axis=1)
    yield "added:QLinearConcat", made([joined], bytes_, ["y"]), _variants(bytes_)
    sequence = [
        node("SequenceConstruct", ["a", "b"], ["q"]),
        node("ConcatFromSequence", ["q"], ["y"], axis=1),
        node("ConcatFromSequence", ["q"], ["z"], axis=0, new_axis=1),
    ]
    yield "plain:ConcatFromSequence", made(sequence[:2], parts, ["y"]), _variants(parts)
    same = {"a": parts["a"], "b": parts["a"]}
    yield "new_axis:ConcatFromSequence", made([sequence[0], sequence[2]], same, ["z"]), _variants(same)


def _like(value: Any, name: str) -> Any:
    made = onnx.ValueInfoProto()
    made.CopyFrom(value)
    made.name = name
    return made


def _guesses(tries: int) -> Iterator[Case]:
    """Yield models of each operator that ONNX Runtime knows, with random inputs; most of them do not fit."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = {TensorProto.DataType.Name(number).lower(): number for number in TensorProto.DataType.values()}
    newest = {(schema.domain, schema.name): schema for schema in sorted(state.get_all_operator_schema(), key=_version)}
    for schema in sorted(newest.values(), key=lambda schema: (schema.name, schema.domain)):
        random = np.random.default_rng(sum(schema.name.encode()))
        allowed = {rule.type_param_str: list(rule.allowed_type_strs) for rule in schema.type_constraints}

        def element(of: str, picked: dict[str, str]) -> int:
            """Return the type of an element, chosen once for all that have it; 0 if it is none of numbers."""
            text = picked.setdefault(of, str(random.choice(allowed.get(of, [of]))))  # noqa: B023
            number = names.get(text.removeprefix("tensor(").removesuffix(")"), 0)
            kind = helper.tensor_dtype_to_np_dtype(number).kind if number else ""
            return number if kind and kind in "fiub" else 0

        for number in range(tries):
            picked: dict[str, str] = {}
            arrays: dict[str, Array] = {}
            inputs = []
            sizes = random.choice([0, 1, 2, 4, 8], 3)
            for i, formal in enumerate(schema.inputs):
                if i >= schema.min_input and random.random() < 0.4:
                    inputs.append("")
                elif kind := element(formal.typeStr, picked):
                    dtype = helper.tensor_dtype_to_np_dtype(kind)
                    arrays[f"i{i}"] = np.ones(random.choice(sizes, random.integers(0, 5)), dtype)
                    inputs.append(f"i{i}")
                else:
                    break
            else:
                given = {name: _attribute(kind, random) for name, kind in schema.attributes.items()
                         if kind.required or random.random() < 0.2}  # fmt: skip
                outputs = [f"o{i}" for i in range(max(1, schema.min_output))]
                node = helper.make_node(schema.name, inputs, outputs, domain=schema.domain, **given)
                model = made([node], arrays, outputs)
                for value, formal in zip(model.graph.output, schema.outputs, strict=False):
                    if kind := element(formal.typeStr, picked):
                        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, None))
                for opset in list(model.opset_import):
                    if opset.domain == schema.domain:
                        model.opset_import.remove(opset)
                model.opset_import.add(domain=schema.domain, version=schema.since_version)
                yield f"guess{number}:{schema.name}", model, [arrays]


def _version(schema: Any) -> int:
    return int(schema.since_version)


def _attribute(attribute: Any, random: np.random.Generator) -> Any:
    """Return a value that an attribute of a schema may have; None for a kind that cannot be guessed."""
    kind = attribute.type.name
    one = {"INT": int(random.choice([0, 1, 2, 4])), "FLOAT": 1.0, "STRING": str(random.choice(["a", "0", "1"]))}
    return one.get(kind) if not kind.endswith("S") else [one[kind[:-1]]] * 2 if kind[:-1] in one else None


def _open(model: Any) -> Any:
    """Return a session as the device makes it, but without an arena, which would hide what the allocator does.

    It is one of the Python module, which gives and takes more than tensors.
    """
    from nnburst.devices.onnxruntime import capi
    from nnburst.devices.onnxruntime.graph import SessionSettings, build_session

    capi.load = lambda: False
    settings = SessionSettings(1)
    options = settings.options()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 4
    return build_session(model.SerializeToString(), {}, settings, options)[0]


def _digest(values: list[Any]) -> str:
    whole = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray) and value.dtype != object:
            whole.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            whole.update(repr(value).encode())
    return whole.hexdigest()


def _run_some(log: Any, numbered: Iterator[tuple[int, dict[str, Array]]], name: str, model: Any) -> None:
    """Run a model in this process, which ONNX Runtime may crash, and stay in for too long."""
    session = None
    for number, inputs in numbered:
        print(f"{number} {name} {[array.shape for array in inputs.values()]}", end=" ", file=log, flush=True)
        signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
        try:
            session = session or _open(model)
            ort.set_seed(1)
            print(_digest(session.run(None, inputs)), file=log, flush=True)
        except Exception:
            print("refused", file=log, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(out: str, pattern: str, tries: int) -> None:
    """Run the cases whose names begin with one of the words of `pattern`, separated by commas."""
    warnings.simplefilter("ignore")
    ort.set_default_logger_severity(4)
    first = 0
    with Path(out).open("a+") as log:
        cases = itertools.chain(_nested_cases(), _own_cases(), _guesses(tries))
        for name, model, variants in itertools.chain.from_iterable((case, computed(case)) for case in cases):
            if not name.startswith(tuple(pattern.split(","))):
                continue
            last = first + len(variants)
            while first < last:
                child = os.fork()
                if not child:
                    _run_some(log, zip(range(first, last), variants[-(last - first) :], strict=True), name, model)
                    os._exit(0)
                status = os.waitpid(child, 0)[1]
                if status == 0:
                    first = last
                else:
                    log.seek(0)
                    begun = int(log.read().splitlines()[-1].split(" ")[0])
                    assert begun >= first, "a process ended before its first case"
                    first = begun + 1
                    print("late" if os.WTERMSIG(status) == signal.SIGALRM else "ended", file=log, flush=True)


def compare(directory: Path, pattern: str, tries: int) -> tuple[int, list[str], list[str]]:
    """Run cases twice, each in a process of its own whose fresh memory holds something else.

    Returns:
        How many ran both times, those with different results, and those that ended their process, without guesses:
        ONNX Runtime crashes over some models whose attributes or ranks are wrong, whatever goes in.
    """
    logs = [directory / f"{perturb}.log" for perturb in (85, 170)]
    with ThreadPoolExecutor(len(logs)) as pool:
        list(pool.map(lambda log: _run_all(log, pattern, tries), logs))
    ends = ("refused", "ended", "late")
    one, other = (
        {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in log.read_text().splitlines()} for log in logs
    )
    both = [case for case in one.keys() & other.keys() if one[case] not in ends and other[case] not in ends]
    ended = {case for log in (one, other) for case in log if log[case] == "ended" and "guess" not in case}
    return len(both), sorted(case for case in both if one[case] != other[case]), sorted(ended)


def _run_all(log: Path, pattern: str, tries: int) -> None:
    command = [sys.executable, __file__, str(log), pattern, str(tries)]
    environment = os.environ | {"MALLOC_PERTURB_": log.stem}
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
