"""Pictures as inputs of models, and boxes drawn into them. Needs Pillow."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgument
from ...runtime import NodeArg
from ..tensors import describe
from .words import Box

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_COLOURS = {1: "L", 3: "RGB"}


def check_pillow(what: str) -> None:
    """Raise `InvalidArgument` if pictures cannot be read or written here."""
    if find_spec("PIL") is None:
        raise InvalidArgument(f"{what}: pictures need Pillow: pip install 'nnburst[pictures]'")


def is_picture(file: str) -> bool:
    return file.lower().endswith(_ENDINGS)


def load_picture(file: str, argument: NodeArg) -> Array:
    """Read a picture as a model takes it: its layout and size, floats from 0 to 1, else bytes.

    Args:
        argument: The input: height, width and channels (1 or 3) in one of the usual orders, with or without a batch.

    Raises:
        InvalidArgument: It cannot be read, or the input takes no pictures.
    """
    shape = () if argument.shape is None else tuple(argument.shape)
    inner = shape[1:] if len(shape) == 4 and (shape[0] == 1 or not isinstance(shape[0], int)) else shape
    axis = next((axis for axis in (2, 0) if len(inner) == 3 and inner[axis] in _COLOURS), None)
    if argument.dtype.kind not in "fu" or (len(inner) != 2 and axis is None):
        raise InvalidArgument(f"{file} is a picture, and the input is no place for one: {describe(argument)}")
    sizes = [size for place, size in enumerate(inner) if place != axis]
    picture = _open(file).convert("L" if axis is None else _COLOURS[inner[axis]])  # type: ignore[index]
    height, width = (
        size if isinstance(size, int) else own for size, own in zip(sizes, (picture.height, picture.width), strict=True)
    )
    array = np.asarray(picture.resize((width, height)))
    if axis is not None:
        array = np.moveaxis(array.reshape(height, width, -1), -1, axis)
    scaled = array / 255 if argument.dtype.kind == "f" else array
    return scaled.astype(argument.dtype).reshape((1,) * (len(shape) - len(inner)) + array.shape)


def draw(array: Array, boxes: Iterable[Box], file: Path) -> None:
    """Write a model's input as a picture with boxes.

    Raises:
        InvalidArgument: It is no picture.
        OSError: It cannot be written.
    """
    from PIL import Image, ImageDraw

    pixels = array[0] if array.ndim == 4 and len(array) == 1 else array
    if pixels.ndim == 3 and pixels.shape[0] in _COLOURS and pixels.shape[2] not in _COLOURS:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in _COLOURS):
        raise InvalidArgument(f"--draw: an input of shape {list(array.shape)} is no picture")
    if pixels.dtype.kind == "f":
        pixels = pixels * 255
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8).squeeze()).convert("RGB")
    pen = ImageDraw.Draw(picture)
    for box in boxes:
        pen.rectangle((box.left, box.top, box.right - 1, box.bottom - 1), outline=(255, 0, 0))
        pen.text((box.left + 2, box.top + 1), f"{box.label} {box.score:.2f}", fill=(255, 0, 0))
    picture.save(file)


def _open(file: str) -> Image:
    check_pillow(file)
    from PIL import Image

    try:
        return Image.open(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"{file} is no picture that can be read: {error}") from None
