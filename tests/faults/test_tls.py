"""The proxies of docs/gateway.md, as they stand there, in front of a gateway that asks for tokens."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support import ROOT
from support.services import save_scaling, shared_service
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

for module in ("grpc", "tritonclient", "aiohttp", "onnx", "onnxruntime"):
    pytest.importorskip(module)

TOKEN = "0123456789abcdef" * 2
COMMANDS = {
    "nginx": ["nginx", "-c", "{file}", "-g", "daemon off; pid {pid}; error_log stderr;"],
    "haproxy": ["haproxy", "-db", "-f", "{file}"],
}


def certificate(directory: Path) -> None:
    """Make cert.pem, key.pem and both.pem for localhost."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, text in (("cert.pem", pem), ("key.pem", own), ("both.pem", pem + own)):
        (directory / file).write_bytes(text)


def configuration(proxy: str, directory: Path, port: int) -> str:
    """The block of the page, with the addresses and files of this test."""
    page = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^```{proxy}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("bind :443", f"bind 127.0.0.1:{port}")
    text = text.replace("/etc/nnburst", str(directory)).replace("/run/nnburst", str(directory))
    if proxy != "nginx":
        return text
    places = "".join(f"{kind}_temp_path {directory};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    text = text.replace("http {", f"http {{ access_log off; {places}", 1)  # where an ordinary user may write
    return f"user root;\n{text}" if os.geteuid() == 0 else text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def rest(port: int, target: str, trusted: Path, token: str = "", body: bytes | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"https://localhost:{port}{target}", body, headers)
    context = ssl.create_default_context(cafile=str(trusted))
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("proxy", ["nginx", "haproxy"])
def test_proxy_of_the_page_hands_both_protocols_on(proxy: str, tmp_path: Path) -> None:
    program = shutil.which(proxy, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"{proxy} is not installed")
    certificate(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"test:{TOKEN}\n")
    port, file = free_port(), tmp_path / "proxy.conf"
    file.write_text(configuration(proxy, tmp_path, port))
    command = [word.format(file=file, pid=tmp_path / "pid") for word in COMMANDS[proxy]]
    places = [f"--oip=unix:{tmp_path}/oip.sock", f"--oip-rest=unix:{tmp_path}/rest.sock", f"--token-file={tokens}"]
    model = save_scaling(tmp_path / "double.onnx", 2.0)
    with (
        shared_service(tmp_path, "--model", f"double={model}", *places),
        subprocess.Popen([program, *command[1:]], cwd=tmp_path, stderr=subprocess.PIPE) as running,
    ):
        try:
            until(lambda: listens(port) or running.poll() is not None, "it does not listen")
            assert running.poll() is None, running.stderr and running.stderr.read().decode()
            asks(port, tmp_path / "cert.pem")
        finally:
            running.terminate()
            running.communicate(timeout=PATIENCE)


def asks(port: int, trusted: Path) -> None:
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    assert rest(port, "/v2/health/ready", trusted)[0] == 200
    assert rest(port, "/v2/models/double/infer", trusted, "", body)[0] == 401
    status, text = rest(port, "/v2/models/double/infer", trusted, TOKEN, body)
    assert (status, "[2.0,4.0,6.0,8.0]" in text.replace(" ", "")) == (200, True), text
    client: Any = triton.InferenceServerClient(f"localhost:{port}", ssl=True, root_certificates=str(trusted))
    try:
        with pytest.raises(InferenceServerException, match="asks for a token"):
            client.get_model_metadata("double")
        shown = client.get_model_metadata("double", headers={"authorization": f"Bearer {TOKEN}"})
        assert shown.name == "double"
    finally:
        client.close()
