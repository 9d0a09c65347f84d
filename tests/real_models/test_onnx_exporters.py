"""What scikit-learn, LightGBM, XGBoost and torch export by default answers as ONNX Runtime does, to the bit.

Each part runs where its packages are: ``make exporters`` installs all of them.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnburst
from support.onnx_models import in_process, ort

RNG = np.random.default_rng(11)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = X @ np.float32([1, -2, 0.5, 0])
NUMBERS = (Y > 0).astype(np.int64) + (Y > 1)
NAMES = np.array(["low", "middle", "hïgh"], object)[NUMBERS]
CITIES = np.array(["rome", "oslo", "lomé", ""], object)[RNG.integers(0, 4, 120)].reshape(-1, 1)
TEXTS = np.array([f"{a} {b[0]} and {b[0]}" for a, b in zip(NAMES, CITIES, strict=True)], object).reshape(-1, 1)

Recipe = Callable[[], tuple[bytes, dict[str, Any]]]


def _of(module: str, name: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **options)


def _sklearn(module: str, name: str, y: Any = NAMES, **options: Any) -> Recipe:
    def make() -> tuple[bytes, dict[str, Any]]:
        to_onnx = pytest.importorskip("skl2onnx").to_onnx
        model = _of(f"sklearn.{module}", name, **options).fit(X, y)
        return to_onnx(model, X[:1], target_opset=17).SerializeToString(), {"X": X}

    return make


def _table(last: Callable[[], Any] | None = None) -> Recipe:
    """Columns of numbers and of strings, as tables have them."""

    def make() -> tuple[bytes, dict[str, Any]]:
        convert = pytest.importorskip("skl2onnx").convert_sklearn
        types = importlib.import_module("skl2onnx.common.data_types")
        columns = [
            ("numbers", _of("sklearn.preprocessing", "StandardScaler"), [0, 1, 2, 3]),
            ("cities", _of("sklearn.preprocessing", "OneHotEncoder", handle_unknown="ignore"), [4]),
        ]
        steps = [("table", _of("sklearn.compose", "ColumnTransformer", columns)), *([("last", last())] if last else [])]
        model = _of("sklearn.pipeline", "Pipeline", steps).fit(np.hstack([X.astype(object), CITIES]), NAMES)
        given = [("x", types.FloatTensorType([None, 4])), ("city", types.StringTensorType([None, 1]))]
        return convert(model, initial_types=given, target_opset=17).SerializeToString(), {"x": X, "city": CITIES}

    return make


def _strings(make_model: Callable[[], Any], column: Any) -> Recipe:
    def make() -> tuple[bytes, dict[str, Any]]:
        convert = pytest.importorskip("skl2onnx").convert_sklearn
        kind = importlib.import_module("skl2onnx.common.data_types").StringTensorType
        flat = make_model()
        is_text = hasattr(flat, "steps")
        flat.fit(column.reshape(-1) if is_text else column, NAMES)
        shape = [None, 1]
        return convert(flat, initial_types=[("x", kind(shape))], target_opset=17).SerializeToString(), {"x": column}

    return make


def _logistic() -> Any:
    return _of("sklearn.linear_model", "LogisticRegression")


def _of_text() -> Any:
    tfidf = _of("sklearn.feature_extraction.text", "TfidfVectorizer", lowercase=False)
    return _of("sklearn.pipeline", "Pipeline", [("tfidf", tfidf), ("last", _logistic())])


def _boosted(library: str, name: str, y: Any, **options: Any) -> Recipe:
    def make() -> tuple[bytes, dict[str, Any]]:
        pytest.importorskip(library)
        tools = pytest.importorskip("onnxmltools")
        kind = importlib.import_module("onnxmltools.convert.common.data_types").FloatTensorType
        model = _of(library, name, n_estimators=5, **options).fit(X, y)
        convert = getattr(tools, f"convert_{library}")
        made = convert(model, initial_types=[("x", kind([None, 4]))], target_opset=15)
        return made.SerializeToString(), {"x": X}

    return make


def _torch(make_model: Callable[[Any], tuple[Any, np.ndarray]]) -> Recipe:
    def make() -> tuple[bytes, dict[str, Any]]:
        torch = pytest.importorskip("torch")
        torch.manual_seed(1)
        model, x = make_model(torch)
        file = io.BytesIO()
        torch.onnx.export(
            model.eval(),
            (torch.from_numpy(x),),
            file,
            input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
            dynamo=False,
            opset_version=17,
        )
        return file.getvalue(), {"x": x}

    return make


def _transformer(torch: Any) -> tuple[Any, np.ndarray]:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), layer), X.reshape(-1, 5, 4)


def _lstm(torch: Any) -> tuple[Any, np.ndarray]:
    return torch.nn.LSTM(4, 6, batch_first=True), X.reshape(-1, 5, 4)


def _cnn(torch: Any) -> tuple[Any, np.ndarray]:
    nn = torch.nn
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return nn.Sequential(*layers), X[:60].reshape(-1, 1, 4, 4)


def _mlp(torch: Any) -> tuple[Any, np.ndarray]:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)), X


RECIPES: dict[str, Recipe] = {
    "logistic of numbers": _sklearn("linear_model", "LogisticRegression", NUMBERS),
    "logistic of strings": _sklearn("linear_model", "LogisticRegression"),
    "forest": _sklearn("ensemble", "RandomForestClassifier", n_estimators=5, random_state=0),
    "linear regression": _sklearn("linear_model", "LinearRegression", Y),
    "components": _sklearn("decomposition", "PCA", None, n_components=2),
    "columns of a table": _table(),
    "classifier of a table": _table(_logistic),
    "ordinals of strings": _strings(lambda: _of("sklearn.preprocessing", "OrdinalEncoder"), CITIES),
    "classifier of text": _strings(_of_text, TEXTS),
    "lightgbm": _boosted("lightgbm", "LGBMClassifier", NUMBERS, verbose=-1),
    "xgboost": _boosted("xgboost", "XGBClassifier", NUMBERS),
    "torch mlp": _torch(_mlp),
    "torch cnn": _torch(_cnn),
    "torch lstm": _torch(_lstm),
    "torch transformer": _torch(_transformer),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray) and a.dtype.kind in ("O", "T"):
        return a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("name", RECIPES)
def test_what_exporters_make_answers_as_onnxruntime_does(service: nnburst.Service, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = RECIPES[name]()
    with service.session(model) as session:
        empty = () if "torch" in name else (0,)  # of which ONNX Runtime itself crashes on some
        for rows in (1, 7, 120, *empty):
            part = {key: value[:rows] for key, value in inputs.items()}
            try:
                expected = in_process(model, part)
            except Exception as error:
                assert rows == 0, error  # some models take no table without rows
                continue
            got = session.run(None, part)
            assert len(got) == len(expected)
            for ours, theirs in zip(got, expected, strict=True):
                assert equal(theirs, ours), (ours, theirs)
    assert ort is not None
