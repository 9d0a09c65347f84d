"""Models with versions: a directory of them, loaded and unloaded over the network, and told apart by local programs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs
from tritonclient.utils import InferenceServerException

import nnburst
from nnburst.errors import InvalidArgument
from nnburst.gateway.metrics import triton_metrics
from nnburst.gateway.models import ModelCounts, Models
from support.gateways import MARKS, PROTOCOLS, both_protocols, raw, tensor
from support.services import Shared, save_scaling, shared_service
from support.waiting import PATIENCE, until

pytestmark = [pytest.mark.check, *MARKS]
PARTS = ("input", "infer", "output")
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two versions of one model, which multiply by their numbers."""
    return two_versions(tmp_path / "models")


def two_versions(models: Path) -> Path:
    for version in (2, 10):
        put(models, version)
    return models


def put(models: Path, version: int, factor: float | None = None) -> Path:
    directory = models / "scale" / str(version)
    directory.mkdir(parents=True, exist_ok=True)
    save_scaling(directory / "model.onnx", version if factor is None else factor)
    return directory


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Callable[..., Shared]]:
    with contextlib.ExitStack() as stack:
        yield lambda *options: stack.enter_context(serving(tmp_path, models, *options))


def serving(directory: Path, models: Path, *options: str) -> contextlib.AbstractContextManager[Shared]:
    listen = ("--oip", "127.0.0.1:0", "--oip-rest", "127.0.0.1:0")
    return shared_service(directory, "--models", str(models), *listen, *options)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A service for tests that leave it as it was."""
    directory = tmp_path_factory.mktemp("shared")
    with serving(directory, two_versions(directory / "models")) as shared:
        yield shared


def client_of(shared: Shared, protocol: str) -> Any:
    return PROTOCOLS[protocol].InferenceServerClient(f"127.0.0.1:{shared.ready['oip'][protocol]}")


def factor(client: Any, protocol: str, version: str = "") -> float:
    given = tensor(PROTOCOLS[protocol], "x", X)
    answer = client.infer("scale", [given], model_version=version)
    said = answer.get_response()
    named = said["model_version"] if protocol == "rest" else said.model_version
    y = answer.as_numpy("y")
    assert version in ("", named)
    np.testing.assert_array_equal(y, X * (y[0, 1] / X[0, 1]))
    assert named in (str(int(y[0, 1])), str(int(y[0, 1]) - 1))
    return float(y[0, 1] / X[0, 1])


def index(client: Any, protocol: str) -> dict[tuple[str, str], str]:
    found = client.get_model_repository_index(**({"as_json": True} if protocol == "grpc" else {}))
    rows = found.get("models", []) if protocol == "grpc" else found
    return {(row["name"], row["version"]): row["state"] for row in rows}


def test_versions_are_told_apart(shared: Shared, protocol: str) -> None:
    assert shared.ready["models"] == ["scale:10", "scale:2"]
    with contextlib.closing(client_of(shared, protocol)) as client:
        options = {"as_json": True} if protocol == "grpc" else {}

        def counts() -> dict[str, int]:
            stats = client.get_inference_statistics("scale", **options)["model_stats"]
            return {row["version"]: int(row.get("inference_count", 0)) for row in stats}

        before = counts()
        assert [factor(client, protocol, version) for version in ("", "2", "10")] == [10, 2, 10]
        assert counts() == {"2": before["2"] + 1, "10": before["10"] + 2}
        assert index(client, protocol) == {("scale", "2"): "READY", ("scale", "10"): "READY"}
        assert client.is_model_ready("scale", "2")
        assert not client.is_model_ready("scale", "3")
        with pytest.raises(InferenceServerException, match=r"the versions \['2', '10'\], not '3'"):
            factor(client, protocol, "3")
        assert client.get_model_metadata("scale", **options)["versions"] == ["2", "10"]
        config = client.get_model_config("scale", "2", **options)
        config = config.get("config", config)
        (given,) = config["input"]
        assert (given["name"], given["data_type"], list(map(int, given["dims"]))) == ("x", "TYPE_FP32", [-1, 4])
        digest = hashlib.sha256((shared.path.parent / "models/scale/2/model.onnx").read_bytes()).hexdigest()
        assert config["parameters"]["sha256"]["string_value"] == digest


def test_local_programs_name_versions_too(shared: Shared) -> None:
    with nnburst.connect(shared.address) as service:
        for name, wanted in (("scale", 10), ("scale:10", 10), ("scale:2", 2)):
            with service.session(name) as session:
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], wanted * X)
        with pytest.raises(InvalidArgument, match=r"'scale:10', 'scale:2'"):
            service.session("scale:3")


def test_loading_serves_what_is_there_now(start: Callable[..., Shared], protocol: str, models: Path) -> None:
    shared = start("--oip-control")
    with (
        contextlib.closing(client_of(shared, protocol)) as client,
        nnburst.connect(shared.address) as service,
        service.session("scale:2") as old,
    ):
        put(models, 11)
        put(models, 10, 10.5)
        shutil.rmtree(models / "scale" / "2")
        assert factor(client, protocol) == 10
        client.load_model("scale")
        assert [factor(client, protocol, version) for version in ("", "11", "10")] == [11, 11, 10.5]
        assert index(client, protocol) == {
            ("scale", "2"): "UNAVAILABLE", ("scale", "10"): "READY", ("scale", "11"): "READY"
        }  # fmt: skip
        np.testing.assert_array_equal(old.run(None, {"x": X})[0], 2 * X)
        client.unload_model("scale")
        with pytest.raises(InferenceServerException, match="model 'scale' was unloaded; ask again when it is loaded"):
            factor(client, protocol)
        with pytest.raises(InvalidArgument):
            service.session("scale")
        shared.process.send_signal(signal.SIGHUP)  # what is unloaded stays so
        assert set(index(client, protocol).values()) == {"UNAVAILABLE"}
        client.load_model("scale")
        assert factor(client, protocol) == 11
        with pytest.raises(InferenceServerException, match="there are no files of a model 'other'; there are"):
            client.load_model("other")


def test_file_that_is_bad_is_served_as_it_was(start: Callable[..., Shared], protocol: str, models: Path) -> None:
    shared = start("--oip-control")
    with contextlib.closing(client_of(shared, protocol)) as client:
        (models / "scale/10/model.onnx").write_bytes(b"no model")
        with pytest.raises(InferenceServerException, match=r"model scale:10 of .*model\.onnx"):
            client.load_model("scale")
        assert factor(client, protocol) == 10
        (models / "scale/10/again.onnx").write_bytes(b"")
        with pytest.raises(InferenceServerException, match="has 2 models"):
            client.load_model("scale")
        assert factor(client, protocol) == 10


def test_new_worker_serves_what_is_loaded(start: Callable[..., Shared], models: Path) -> None:
    shared = start("--oip-control")
    put(models, 11)
    with contextlib.closing(client_of(shared, "grpc")) as client:
        client.load_model("scale")
        (models / "scale/2/model.onnx").write_bytes(b"no model")
        os.kill(shared.worker, signal.SIGKILL)

        def answer() -> float:
            try:
                return factor(client, "grpc")
            except InferenceServerException:
                return 0

        until(lambda: answer() == 11, "it is not served again")


def test_hup_finds_new_versions(start: Callable[..., Shared], models: Path) -> None:
    shared = start()
    put(models, 12)
    shared.process.send_signal(signal.SIGHUP)
    with contextlib.closing(client_of(shared, "grpc")) as client:
        until(lambda: ("scale", "12") in index(client, "grpc"), "it is not found")
        assert factor(client, "grpc") == 12


def test_health_and_reflection(start: Callable[..., Shared]) -> None:
    shared = start("--oip-control")
    with grpc.insecure_channel(f"127.0.0.1:{shared.ready['oip']['grpc']}") as channel:
        health = HealthStub(channel)

        def status(name: str) -> str:
            return str(HealthCheckResponse.ServingStatus.Name(health.Check(HealthCheckRequest(service=name)).status))

        assert status("") == status("inference.GRPCInferenceService") == status("scale") == "SERVING"
        with pytest.raises(grpc.RpcError, match="no model 'other'") as unknown:
            status("other")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as unserved:  # so that clients who would watch it ask nothing
            next(health.Watch(HealthCheckRequest(), timeout=PATIENCE))
        assert unserved.value.code() is grpc.StatusCode.UNIMPLEMENTED
        stubs.GRPCInferenceServiceStub(channel).RepositoryModelUnload(
            pb.RepositoryModelUnloadRequest(model_name="scale")
        )
        assert status("scale") == "NOT_SERVING"
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked))
        services = {service.name for service in answer.list_services_response.service}
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} < services


def test_counts_have_the_names_of_triton(start: Callable[..., Shared]) -> None:
    shared = start()
    with contextlib.closing(client_of(shared, "rest")) as client:
        for _ in range(3):
            factor(client, "rest", "2")
        with pytest.raises(InferenceServerException):
            client.infer("scale", [tensor(PROTOCOLS["rest"], "x", np.zeros((1, 5), np.float32))])
    with urllib.request.urlopen(f"http://127.0.0.1:{shared.ready['oip']['rest']}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    assert 'nv_inference_request_success{model="scale",version="2"} 3' in lines
    assert 'nv_inference_count{model="scale",version="10"} 0' in lines
    assert "# TYPE nv_inference_request_duration_us counter" in lines
    assert 'nv_inference_request_failure{model="scale",version="10",reason="OTHER"} 1' in lines
    assert 'nv_inference_request_failure{model="scale",version="2",reason="BACKEND"} 0' in lines
    assert 'nv_inference_pending_request_count{model="scale",version="2"} 0' in lines
    values = {labels: int(value) for labels, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    parts = [values[f'nv_inference_compute_{part}_duration_us{{model="scale",version="2"}}'] for part in PARTS]
    assert 0 < parts[1] <= sum(parts) <= values['nv_inference_request_duration_us{model="scale",version="2"}']


@pytest.mark.representative
def test_labels_are_as_prometheus_reads_them() -> None:
    counts = [('d\xe9tecteur "\\\n', "1", ModelCounts(inferences=3))]
    line = 'nv_inference_count{model="d\xe9tecteur \\"\\\\\\n",version="1"} 3'
    assert line in triton_metrics(counts).splitlines()
    parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra nnburst[metrics]")
    families = {family.name: family for family in parser.text_string_to_metric_families(triton_metrics(counts))}
    (sample,) = families["nv_inference_count"].samples
    assert (sample.labels["model"], sample.value) == (counts[0][0], 3)


@pytest.mark.representative
def test_refusals_for_the_moment_say_when_to_try_again() -> None:
    async def main() -> None:
        async with both_protocols(Models("no-such-service")) as (stub, http):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(raw(8))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("grpc-retry-pushback-ms", "1000") in list(refused.value.trailing_metadata())
            async with http.get("/v2/models/slow") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")

    asyncio.run(main())


def test_options_that_do_not_fit_are_refused(tmp_path: Path, models: Path) -> None:
    (tmp_path / "several" / "m" / "1").mkdir(parents=True)
    for options, said in (
        (["--models", str(tmp_path / "none")], "cannot be read"),
        (["--models", str(tmp_path / "several")], "has 0 models"),
        (["--models", str(models), "--oip-control"], "are for clients of --oip"),
        (["--models", str(models), "--oip-key", "key.pem"], "are for clients of --oip"),
        (["--models", str(models), "--oip", "8001"], "HOST:PORT"),
        (["--device", "nnburst-noop", "--oip", "127.0.0.1:8001"], "--model"),
    ):
        with pytest.raises(AssertionError, match=said), shared_service(tmp_path, *options):
            pass
