"""The log of a service stays small, whatever its clients do."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

import nnburst
from nnburst.service.process import limited_log
from nnburst.service.process.limited_log import LINES, LONGEST, PERIOD, JsonLines, LimitedHandler
from support.waiting import until


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limited_log, "time", clock)
    return clock


@pytest.fixture
def written(clock: Clock) -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(written: io.StringIO) -> Iterator[logging.Logger]:
    log = logging.getLogger("nnburst.test of the log")
    handler = LimitedHandler()
    handler.setStream(written)
    log.addHandler(handler)
    log.propagate = False
    yield log
    log.removeHandler(handler)
    handler.close()


def hostile(log: logging.Logger, times: int) -> None:
    for number in range(times):
        log.warning("malformed message %d", number)


def test_lines_of_one_place_are_written_a_few_times_and_counted_then(
    log: logging.Logger, written: io.StringIO, clock: Clock
) -> None:
    hostile(log, 1000)
    assert len(written.getvalue().splitlines()) == LINES
    log.warning("another thing")
    assert written.getvalue().splitlines()[LINES:] == ["another thing"]
    clock.now += PERIOD
    hostile(log, 1)
    *_, told, again = written.getvalue().splitlines()
    assert told.startswith(f"{1000 - LINES} lines from test_service_logging.py:")
    assert again == "malformed message 0"


def test_what_was_left_out_is_told_at_the_end(log: logging.Logger, written: io.StringIO) -> None:
    hostile(log, LINES + 3)
    log.handlers[0].close()
    assert written.getvalue().splitlines()[-1].startswith("3 lines from")


def test_long_line_is_cut(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("%s", "x" * 1_000_000)
    (line,) = written.getvalue().splitlines()
    assert line == "x" * LONGEST + f"… ({1_000_000 - LONGEST} characters more)"


def test_json_line_has_the_record_and_its_fields(log: logging.Logger, written: io.StringIO) -> None:
    log.handlers[0].setFormatter(JsonLines())
    try:
        raise ValueError("odd")
    except ValueError:
        log.exception("line\n%s", "x" * 1_000_000, extra={"fields": {"request_id": "r-1"}})
    (line,) = map(json.loads, written.getvalue().splitlines())
    assert line["message"] == "line\n" + "x" * (LONGEST - 5)
    assert line["traceback"].endswith("ValueError: odd")
    assert (line["level"], line["logger"], line["request_id"]) == ("error", log.name, "r-1")


def test_log_of_a_service_is_in_the_log_of_its_program(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("program.models")
    with caplog.at_level(logging.INFO, logger.name), nnburst.launch(log_level="info", log=logger) as service:
        until(lambda: caplog.records, "nothing is logged")
        said = caplog.records[0]
        assert (said.name, said.levelname, said.getMessage()) == (logger.name, "INFO", f"sandbox {service.sandbox}")
