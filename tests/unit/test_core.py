"""The border to C: the header is the truth, errno becomes an exception, waiting calls let other threads run."""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import extension
import pytest

import nnburst._core
from nnburst import errors
from nnburst._core._nnburst import ffi, lib
from nnburst._core.deadline import Deadline
from nnburst._core.errno import check
from nnburst._core.fds import FdSet, close_fds
from support import ROOT

CORE = Path(inspect.getfile(nnburst._core)).parent


def test_module_was_built_from_the_present_header() -> None:
    assert ffi.string(lib.nnb_py_header_digest).decode() == extension.digest(extension.read_cdef(ROOT / "csrc")), (
        "stale: make ext"
    )


def test_stub_was_written_from_the_present_header() -> None:
    assert (CORE / "_nnburst.pyi").read_text() == extension.stub(extension.read_cdef(ROOT / "csrc"))


def test_every_function_of_the_header_is_in_the_module_and_in_the_stub() -> None:
    # Read with another pair of eyes than the build script's: any "name(" at the beginning of a declaration.
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc" / "nnburst.h").read_text(), flags=re.DOTALL)
    names = set(re.findall(r"^[a-z][\w \*]*?\b(nnb_\w+)\(", text, flags=re.MULTILINE))
    assert len(names) > 30
    assert names <= set(dir(lib))
    assert names == set(extension.functions(extension.read_cdef(ROOT / "csrc")))


def test_errno_becomes_the_exception_of_its_meaning() -> None:
    assert check(0) == 0
    assert check(7) == 7
    expected = {
        errno.EINVAL: errors.InvalidArgument,
        errno.ETIMEDOUT: errors.MissedDeadline,
        errno.EPIPE: errors.DeadObject,
        errno.ENOMEM: errors.ResourceExhausted,
        errno.EBUSY: errors.BadState,
        errno.EBADMSG: errors.GeneralFailure,
        errno.EIO: errors.GeneralFailure,
    }
    for number, kind in expected.items():
        with pytest.raises(errors.NNBurstError, match=f"^doing it: .*{errno.errorcode[number]}") as caught:
            check(-number, "doing it")
        assert type(caught.value) is kind
    with pytest.raises(errors.GeneralFailure):
        check(-99999)


def test_deadlines_are_absolute_and_never_the_value_for_none_by_accident() -> None:
    now = lib.nnb_now_ns()
    assert Deadline.after(None) == Deadline.after(float("inf")) == Deadline.after(1e30) == Deadline(0)
    assert 0 < Deadline.after(0).at_ns < now
    for wrong in (-5, float("nan"), "1", [1]):
        with pytest.raises(errors.InvalidArgument, match="None to wait without a limit"):
            Deadline.after(wrong)  # type: ignore[arg-type]
    assert now + 10**9 <= Deadline.after(1.0).at_ns


def test_descriptors_are_closed_once_whatever_state_they_are_in() -> None:
    r, w = os.pipe()
    os.close(w)
    given = [r, w]
    close_fds(given)
    close_fds(given)
    assert given == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(r)


def test_descriptors_that_another_thread_closes_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    owner, look = FdSet([null]), fcntl.fcntl

    def closes(*arguments: Any) -> Any:
        owner.close()
        return look(*arguments)

    monkeypatch.setattr(fcntl, "fcntl", closes)
    with closing(owner.copy()) as copy:
        assert os.path.samestat(os.fstat(copy.fds[0]), os.stat(os.devnull))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(null)
    with pytest.raises(errors.BadState, match="duplicate them before closing"):
        owner.copy()
