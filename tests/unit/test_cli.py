"""`nnburst`: the group of commands, the doctor, the demo and the cache."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import click
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result

import nnburst
from nnburst.cache.directory import Cache
from nnburst.cli import doctor as checks
from nnburst.cli import main
from nnburst.cli._main import COMMANDS
from nnburst.cli.demo import command, network
from nnburst.cli.doctor import CHECKS, Finding, Level, all_checks
from nnburst.cli.progress import call_with_notice
from nnburst.cli.serve.command import serve
from nnburst.cli.serve.repository import Repository
from nnburst.devices import device_names
from nnburst.service.wire.protocol import Sandbox
from support import ROOT, usable_devices
from support.waiting import until


def test_help_lists_every_command_without_importing_any() -> None:
    code = (
        "import sys\n"
        "from nnburst.cli import main\n"
        "try: main(['--help'], prog_name='nnburst')\n"
        "except SystemExit as ended: assert not ended.code\n"
        f"assert not set({[row.module for row in COMMANDS.values()]}) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_loads_and_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name}")


@pytest.mark.parametrize("name", ["run", "demo", "serve"])
def test_line_is_on_the_terminal_while_a_model_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)

    def compiled(*_: object, **__: object) -> NoReturn:
        words = "compiling the network …" if name == "demo" else "compiling m.onnx …"
        until(lambda: terminal.getvalue() == words, terminal.getvalue)
        raise LookupError

    model = SimpleNamespace(model=SimpleNamespace(pools=()))
    monkeypatch.setattr("nnburst.cli.serve.repository.import_model", lambda *_: nullcontext(("device", model)))
    monkeypatch.setattr("nnburst.runtime.session.Session", compiled)
    monkeypatch.setattr(command, "launch", lambda **_: nullcontext(SimpleNamespace(session=compiled)))
    monkeypatch.setattr("nnburst.cli.progress.PATIENCE", 0)
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(LookupError):
        if name == "serve":
            Repository({"m": "m.onnx"}).prepare(SimpleNamespace(list_models=dict, publish=compiled))
        else:
            main([name, *["m.onnx"] * (name == "run")], standalone_mode=False)
    assert terminal.getvalue().endswith(" …\r\033[K")


def test_long_call_shows_nothing_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert call_with_notice("compiling", int, "3") == 3


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run `nnburst serve` with a file of options, and return those that it gets, or what is wrong with them."""
    got: dict[str, Any] = {}
    monkeypatch.setattr(serve, "callback", lambda **options: got.update(options))

    def run(config: str, *arguments: str, **env: str) -> Any:
        file = tmp_path / "serve.toml"
        file.write_text(config)
        result = CliRunner().invoke(main, ["serve", "--config", str(file), *arguments], env=env)
        return got if result.exit_code == 0 else result.output

    return run


def test_options_of_serve_come_from_the_line_then_variables_then_a_file(serve_with: Callable[..., Any]) -> None:
    config = """
    functions = ["filters.py:edges"]
    name = "file"
    device = ["of the file"]
    max-run = 2.5
    oip-control = true
    quota = {models = 3, user.models = 4}
    model = {a = "a.onnx"}
    """
    got = serve_with(config, "--name", "line", NNBURST_SERVE_NAME="variable", NNBURST_SERVE_DEVICE="one two")
    assert (got["functions"], got["name"], got["device"]) == (("filters.py:edges",), "line", ("one", "two"))
    assert (got["max_run"], got["oip_control"]) == (2.5, True)
    assert (got["quota"], got["model"]) == (("models=3", "user.models=4"), ("a=a.onnx",))


def test_file_of_options_of_the_page_is_read_as_printed(serve_with: Callable[..., Any]) -> None:
    (config,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "sharing.md").read_text("utf-8"), re.DOTALL)
    got = serve_with(config)
    assert (got["name"], got["model"], got["max_run"]) == ("vision", ("detector=detector.onnx",), 2.5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("title = 3", "has title; nnburst serve has no such option.\n"),
        ('names = "x"', "has names; nnburst serve has no such option. Did you mean"),
        ("name =", "is no TOML"),
        ('sandbox = "maybe"', "'maybe' is not one of"),
        ("oip-control = 3", "'3' is not a valid boolean"),
        ("max-run = true", "'True' is not a valid"),
        ('config = "other.toml"', "has config; nnburst serve has no such option"),
        ("max-run = nan", "'nan' is not a number of seconds"),
        ('max-run = "long"', "'long' is not a valid number of seconds"),
        ("max-run = 1\nmax_run = 2", "has max_run twice"),
        ('name = ["vision"]', "has name = ['vision']; this option takes a single value"),
        ("oip-control = [true]", "this option takes a single value"),
        ('device = "nnburst-noop"', "this option takes a list or a table"),
        ("name = " + "[" * 5000, "is no TOML"),
    ],
)
def test_file_of_options_that_is_wrong_is_refused(serve_with: Callable[..., Any], config: str, said: str) -> None:
    assert said in serve_with(config)


def test_a_character_that_the_terminal_has_not_is_a_question_mark(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nnburst", "cache", "path"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "NNBURST_CACHE_DIR": str(tmp_path / "→")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


@pytest.mark.skipif(not hasattr(click, "NoSuchCommand"), reason="click before 8.4 suggests options, no commands")
def test_misspelt_command_is_answered_with_the_nearest() -> None:
    assert "No such command 'server'. Did you mean 'serve'?" in CliRunner().invoke(main, ["server"]).output


@pytest.mark.parametrize("command", ["ls", "--help"])
def test_output_without_room_is_one_sentence(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nnburst", command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert re.fullmatch(r"Error: the system refuses .*: \[Errno 28\] No space left on device\n", done.stderr)


@pytest.mark.check
def test_doctor_fails_and_goes_on_when_a_check_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise OSError(38, "no such call [here]")

    monkeypatch.setitem(CHECKS, "CPUs", broken)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "no such call [here]" in result.stdout
    counts = dict(pair.split("=") for pair in result.stdout.splitlines()[-1].removeprefix("doctor: ").split())
    assert sum(map(int, counts.values())) == len(all_checks())
    assert counts["fail"] == "1", result.stdout


@pytest.mark.check
def test_doctor_imports_each_extra_and_says_what_each_device_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "CHECKS", {})
    (tmp_path / "asking.py").write_text(
        "from nnburst.devices.function import Needs, Tensor, declare\n"
        "x, y = [Tensor('x', 'float32', (1,))], [Tensor('y', 'float32', (1,))]\n"
        f"@declare(inputs=x, outputs=y, needs=Needs(read=[{str(tmp_path)!r}], network=True))\n"
        "def asking(x): return x\n"
    )
    device = f"nnburst-function:call={tmp_path}/asking.py:asking"
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json", device]).stdout)
    rows = {row["check"]: row["found"] for row in found["checks"]}
    assert len(rows) == len(checks.EXTRAS) + len(device_names()) + 1
    assert found["ok"] == len(rows), "an extra that is not installed is no warning"
    needs = {name: found.rpartition("needs: ")[2] for name, found in rows.items() if "opens in a service" in found}
    usual = {f"device {name}": "nothing" for name in usable_devices()}
    assert needs == {**usual, f"device {device}": f"reads {tmp_path}; uses the network"}


@pytest.mark.parametrize("landlock", [0, 6])
def test_doctor_says_which_walls_services_have(monkeypatch: pytest.MonkeyPatch, landlock: int) -> None:
    box = Sandbox("on", landlock, seccomp=True, missing=() if landlock else ("Landlock for files",))
    monkeypatch.setattr(nnburst.Service, "sandbox", property(lambda service: box))
    finding = CHECKS["sandbox"]()
    assert finding.found == ("on: Landlock 6, seccomp" if landlock else "on: seccomp; without Landlock for files")
    assert (finding.level, bool(finding.remedy)) == ((Level.OK, False) if landlock else (Level.WARN, True))


def test_doctor_says_why_a_device_does_not_open() -> None:
    finding = checks.check_device("nnburst-nothing")
    assert finding.level is Level.WARN
    assert "no device 'nnburst-nothing'" in finding.remedy


def test_extra_that_cannot_be_imported_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extra.py").write_text("raise OSError('this wheel is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(checks.EXTRAS, "broken", ("broken_extra",))
    finding = checks.run_check(lambda: checks.check_extra("broken"))
    assert (finding.level, finding.found) == (Level.FAIL, "OSError: this wheel is broken")


def test_doctor_says_what_installs_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.EXTRAS, "litert", ("nnburst_missing_module",))
    said = Finding(Level.OK, "optional; nnburst_missing_module is not installed (pip install 'nnburst[litert]')")
    assert [checks.check_extra("litert"), checks.check_device("nnburst-litert")] == [said] * 2


@pytest.mark.parametrize("of_user", [True, False])
def test_doctor_fails_only_for_a_named_device_whose_extra_is_missing(
    monkeypatch: pytest.MonkeyPatch, of_user: bool
) -> None:
    def launch(**_: object) -> NoReturn:
        raise nnburst.DeviceUnavailable("nnburst-litert: there is no ai_edge_litert")

    monkeypatch.setattr(checks, "CHECKS", {})
    monkeypatch.setattr(checks, "EXTRAS", {"litert": ("nnburst_missing_module",)})
    monkeypatch.setattr("nnburst.devices.registry.device_names", lambda: ["nnburst-litert"])
    monkeypatch.setattr("nnburst.runtime.open_service.launch", launch)
    result = CliRunner().invoke(main, ["doctor", *["nnburst-litert"] * of_user])
    assert result.exit_code == of_user
    assert result.stdout.startswith("fail  device nnburst-litert" if of_user else "ok    device nnburst-litert")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


WITHOUT = {("cache", verb) for verb in ("path", "prune")} | {(verb,) for verb in ("demo", "kick", "stop", "trace")}
"""Commands that change something, and one that prints two lines of two words."""


def test_every_other_command_has_json() -> None:
    without = {path for path, command in commands(main) if "--json" not in {o for p in command.params for o in p.opts}}
    assert without == WITHOUT


def test_doctor_warns_of_a_single_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    finding = checks.check_cpus()
    assert finding.level is Level.WARN
    assert "second CPU" in finding.remedy


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "\udcff"], ids=["superscript", "long", "surrogate"])
def test_top_takes_any_text_for_the_name_of_a_service(text: str) -> None:
    for once in (["--once"], []):
        result = CliRunner().invoke(main, ["top", *once, text])
        assert result.exit_code == 1
        assert "no service" in result.output


def test_trace_of_a_command_that_runs_no_model_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["trace", "-o", str(tmp_path / "trace.json"), "true"])
    assert result.exit_code == 0
    assert result.stderr.endswith("the command has run no model through nnburst\n")


# ---- the demo ------------------------------------------------------------------------------------------------------


LAST_LINE = re.compile(r"demo: accuracy=(0\.\d{4}|1\.0000) p50_us=\d+\.\d p99_us=\d+\.\d pipe_p50_us=\d+\.\d")

FloatArray = npt.NDArray[np.float32]


def test_race_lets_contenders_take_turns_and_times_every_call() -> None:
    images = np.random.default_rng(3).random((450, *network.IMAGE_SHAPE), dtype=np.float32)
    calls: list[str] = []

    def contender(name: str) -> Callable[[FloatArray], FloatArray]:
        return lambda image: calls.append(name) or image.reshape(-1)[:10].reshape(1, 10).copy()  # type: ignore[func-returns-value]

    took, answers = command.race({name: contender(name) for name in "ab"}, images, 3)
    assert "".join(calls[2 * command.WARM_UP :]) == ("a" * 450 + "b" * 450) * 3
    assert {len(each) for each in took.values()} == {3 * 450}
    assert np.array_equal(answers["a"][:, :, 0], [images.reshape(450, -1)[:, :10]] * 3)


def test_percentiles_are_in_microseconds_and_were_observed() -> None:
    assert command.percentiles_us(np.arange(1, 1001, dtype=np.int64) * 1000) == [501.0, 901.0, 991.0, 1000.0]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", ROOT / "examples" / "digits" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_computes_what_the_training_script_trained(training: ModuleType) -> None:
    digits = network.load_digits()
    with np.load(network.DATA / "weights.npz") as weights:
        expected, _ = training.forward(dict(weights), digits.images[:50, 0])
    with (
        nnburst.in_process(devices=["nnburst-reference"]) as service,
        service.session(network.build_model()) as session,
    ):
        got = np.concatenate(list(map(command.classifier(session), digits.images[:50])))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_files_of_the_demo_are_those_that_the_script_makes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    script = ROOT / "examples" / "digits" / "models.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True, timeout=60)
    for name in network.EXAMPLES:
        assert onnx.load(tmp_path / name) == onnx.load(network.DATA / name), name


@pytest.mark.check
def test_demo_ends_with_the_machine_readable_line_and_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nnburst", "demo", "--passes", "1"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    assert float(match.group(1)) >= 0.97
    assert done.stderr == ""  # no bar where there is no terminal


@pytest.mark.check
def test_demo_fails_when_a_burst_answer_was_tampered_with(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, victim = command.classifier, network.load_digits().images[1234]

    def tampered(session: nnburst.Session) -> command.Ask:
        ask = classifier(session)
        tampers = session.service.pid != os.getpid()

        def answer(image: FloatArray) -> FloatArray:
            given = ask(image)
            if tampers and np.array_equal(image, victim):
                given.view(np.uint32)[0, 3] ^= 1
            return given

        return answer

    monkeypatch.setattr(command, "classifier", tampered)
    result = CliRunner().invoke(main, ["demo", "--passes", "1"])
    assert result.exit_code == 1, result.output
    assert "1 answers of burst to the service differ from in-process execution" in result.stderr
    assert not result.stdout.splitlines()[-1].startswith("demo:")


@pytest.mark.parametrize("name", ["digits", "digits.npy"])
def test_model_is_saved_where_run_finds_it(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["demo", "--save", str(tmp_path / name)])
    assert (done.exit_code, "ends with .onnx" in done.output, [*tmp_path.iterdir()]) == (1, True, [])


def test_demo_names_a_device_that_does_not_exist() -> None:
    result = CliRunner().invoke(main, ["demo", "--device", "nobody-knows"])
    assert result.exit_code == 1
    assert "nobody-knows" in result.stderr
    assert "Traceback" not in result.output


# ---- the cache -----------------------------------------------------------------------------------------------------


def save(cache: Cache, entry: str, used: int) -> None:
    """Put an entry of 1000 bytes into a directory without asking a device."""
    with contextlib.closing(cache.stage(entry, (1, 0))) as staged:
        os.pwrite(staged.model_fds[0], bytes(1000), 0)
        staged.publish(bytes(16))
        os.utime(Path(cache.path, "objects", entry[:2], f"{entry}.{'0' * 32}"), (used, used))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for entry, used in (("a" * 64, 2000), ("b" * 64, 1000)):
        save(Cache(tmp_path / "c"), entry, used)
    return tmp_path / "c"


def call(directory: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["cache", "--dir", str(directory), *arguments])
    assert result.exit_code == code, result.output
    return result


def listed(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call(directory, "ls", "--json").output)["entries"]
    return found


def test_ls_shows_what_is_there_the_longest_unused_first(directory: Path) -> None:
    assert [(row["entry"][0], row["used"], row["nbytes"]) for row in listed(directory)] == [
        ("b", 1000, 1000),
        ("a", 2000, 1000),
    ]
    text = call(directory, "ls").output
    assert "2 entries" in text
    assert "a" * 12 in text


def test_ls_of_nothing_and_of_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir(mode=0o700)
    assert "0 entries" in call(tmp_path / "none", "ls").output
    unused = CliRunner(env={"NNBURST_CACHE_DIR": str(tmp_path / "not yet")}).invoke(main, ["cache", "ls"])
    assert "0 entries" in unused.output
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    call(tmp_path / "open", "ls", code=3)


def test_prune_by_size_and_of_all(directory: Path) -> None:
    assert "0 entries removed" in call(directory, "prune").output
    assert "0 entries removed" in call(directory, "prune", "--max-bytes", "1G").output
    assert "1 entries removed" in call(directory, "prune", "--max-bytes", "1.9 KiB").output
    assert [row["entry"] for row in listed(directory)] == ["a" * 64]
    assert "1 entries removed" in call(directory, "prune", "--all").output
    for wrong in ("lots", "5x", "-1"):
        call(directory, "prune", "--max-bytes", wrong, code=2)


def test_prune_leaves_what_is_in_use(directory: Path) -> None:
    with contextlib.closing(next(Cache(directory).look_up("a" * 64, (1, 0)))):  # type: ignore[call-overload]
        assert "1 entries are in use" in call(directory, "prune", "--all", code=1).output
    assert [row["entry"] for row in listed(directory)] == ["a" * 64]


def test_path_names_both_directories(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    assert call(directory, "path").output.splitlines() == [f"cache {directory}", f"state {tmp_path / 'state'}"]


@pytest.mark.parametrize("command", ["ls", "path", "prune"])
def test_directory_that_does_not_exist_is_a_usage_error(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["cache", "--dir", str(tmp_path / "nope"), command])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert not (tmp_path / "nope").exists()
