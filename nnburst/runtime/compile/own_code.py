"""Functions and torch modules as models, which run in the session's own service."""

from __future__ import annotations

import inspect
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..._core.log import warn
from ...devices.function import Declaration, Tensor, declare
from ...errors import InvalidArgument, NNBurstError
from ...model.types import Array
from ..service import DEFAULT_DEVICES

if TYPE_CHECKING:
    import torch

_ONNX, _FUNCTIONS = "nnburst-onnxruntime", "nnburst-function"


def is_torch_module(model: object) -> bool:
    modules = sys.modules.get("torch.nn")  # a program that has a torch module has imported torch
    return modules is not None and isinstance(model, modules.Module)


def from_torch(module: torch.nn.Module, examples: object, device: str | None) -> bytes | Callable[..., Any]:
    """Return a torch module as an ONNX file, or as a declared function that runs it.

    Args:
        examples: A tensor, a tuple or list in the order of the arguments of ``forward``, or a dict by argument name.
            The model's inputs have the dtypes and shapes of the examples.
        device: ``"nnburst-onnxruntime"`` to require an ONNX file, ``"nnburst-function"`` to require a function; None to
            accept either.

    Raises:
        InvalidArgument: There are no examples; the module does not accept them, or returns values other than tensors;
            or the module cannot be exported to a required ONNX file.
    """
    import torch

    if examples is None:
        raise InvalidArgument(
            "a torch module does not say what it takes: give example inputs, Session(module, tensor), or several in a "
            "tuple or in a dict"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidArgument("torch neither exports nor pickles a ScriptModule; give the module that it was made from")
    args = [] if isinstance(examples, Mapping) else [*examples] if isinstance(examples, tuple | list) else [examples]
    kwargs = dict(examples) if isinstance(examples, Mapping) else {}
    names = [*_parameters(module, len(args)), *kwargs]
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            answer = module(*args, **kwargs)
        outputs = _tensors(answer)
        why = ""
        if device != _FUNCTIONS and (device or _ONNX in DEFAULT_DEVICES):
            try:
                return _export(module, tuple(args), kwargs, names, [*outputs])
            except Exception as error:
                cause = error.__cause__ or error
                why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    except NNBurstError:
        raise
    except Exception as error:
        raise InvalidArgument(f"the module fails with these examples: {type(error).__name__}: {error}") from error
    finally:
        for each, training in modes:
            each.training = training
    what = type(module).__name__
    if why and device is not None:
        raise InvalidArgument(f"torch.onnx.export() fails for {what}: {why}")
    if why:
        warn("nnburst.torch", "torch itself runs %s in the service, as torch.onnx.export() fails: %s", what, why)
    run = _ModuleFunction(module, [*kwargs])
    declared = declare(
        inputs=[_described(*row) for row in zip(names, [*args, *kwargs.values()], strict=True)],
        outputs=[_described(*row) for row in outputs.items()],
        name=what,
    )
    return declared(run)


class _ModuleFunction:
    """A torch module as a function of arrays."""

    __nnburst__: Declaration

    def __init__(self, module: torch.nn.Module, keywords: list[str]) -> None:
        self._module, self._keywords = module, keywords

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module.eval()  # this changes only the copy in the service

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        import torch

        tensors = [torch.tensor(array) for array in arrays]  # torch.tensor copies, because modules can write to inputs
        first = len(tensors) - len(self._keywords)
        with torch.no_grad():
            answer = self._module(*tensors[:first], **dict(zip(self._keywords, tensors[first:], strict=True)))
        return tuple(tensor.numpy() for tensor in _tensors(answer).values())


def _parameters(module: torch.nn.Module, n: int) -> list[str]:
    """Return names of a module's first `n` inputs: the argument names of ``forward``, or ``input0``, ``input1`` …"""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return [*named[:n], *(f"input{i}" for i in range(len(named), n))]


def _tensors(answer: Any) -> dict[str, torch.Tensor]:
    import torch

    if isinstance(answer, tuple | list):
        answer = {f"output{i}": each for i, each in enumerate(answer)}
    named = dict(answer) if isinstance(answer, Mapping) else {"output": answer}
    if not named or not all(isinstance(each, torch.Tensor) for each in named.values()):
        kinds = sorted({type(each).__name__ for each in named.values()})
        raise InvalidArgument(f"the module returns {kinds}; have it return tensors: one, several in a tuple, or a dict")
    return named


def _described(name: str, tensor: torch.Tensor) -> Tensor:
    if not hasattr(tensor, "dtype"):
        raise InvalidArgument(f"example {name!r} is {tensor!r}; give a tensor")
    return Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[str], outputs: list[str]
) -> bytes:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, args, kwargs=kwargs, input_names=inputs, output_names=outputs, dynamo=True, verbose=False
        )
    assert program is not None
    file = io.BytesIO()
    program.save(file)
    return file.getvalue()
