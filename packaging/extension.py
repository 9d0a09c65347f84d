"""Build the cffi module from the C header.

The header ``csrc/nnburst.h`` is the only description of the C interface: the text for cffi's ``cdef`` and the type
stub ``_nnburst.pyi`` are derived from it at each build. The C compiler then compares every declaration with the real
one. The module contains a digest of the header, by which a stale build is noticed (`nnburst._core.header_digest`).

setuptools (``cffi_modules``) runs this file as a plain script, so it imports nothing from the package. By hand::

    python packaging/extension.py
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import tempfile
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "nnburst" / "_core"
HEADER = "nnburst.h"
_LINE = 120

_DEFINE = re.compile(r"#\s*define\s+(\w+)[ \t]+(.+)")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|[0-9]+)([uUlL]*)$")
_FUNCTION = re.compile(r"^(?P<result>[\w\s]*?\w[\s*]+?)(?P<name>\w+)\s*\((?P<args>.*)\)$", re.DOTALL)
_ENUM = re.compile(r"enum\s*\w*\s*\{(.*?)\}", re.DOTALL)
_INTEGER_TYPES = re.compile(r"^(u?int\d*(_t)?|size_t|ssize_t|long|short|unsigned|signed|char|_Bool|bool|uintptr_t)$")


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def header_to_cdef(text: str) -> str:
    """Convert the text of a header for cffi's ``cdef``.

    Comments, includes, guards and function-like macros are dropped. Constants are kept. A constant that is a plain
    number keeps its value, so that the compiler checks the value.
    """
    lines: list[str] = []
    for line in _without_comments(text).replace("\\\n", " ").splitlines():
        stripped = line.strip()
        if not stripped.startswith("#"):
            lines.append(line.rstrip())
        elif match := _DEFINE.match(stripped):
            name, value = match.group(1), match.group(2).strip()
            number = _INTEGER.match(value)
            lines.append(f"#define {name} {number.group(1) if number else '...'}")
    return re.sub(r"\n{2,}", "\n", "\n".join(lines)).strip() + "\n"


def _python_type(c_type: str) -> str:
    """Return the Python type that cffi uses for a C type, given with or without a parameter name."""
    if "*" in c_type or "[" in c_type:
        text = re.match(r"^\s*const\s+(char|void)\s*\*", c_type)
        return "CData | bytes" if text else "CData"
    words = [word for word in c_type.split() if word not in ("const", "struct", "enum")]
    if words[0] == "void":
        return "None"
    return "int" if _INTEGER_TYPES.match(words[0]) else "CData"


def _arguments(text: str) -> list[str]:
    if text.strip() in ("", "void"):
        return []
    out: list[str] = []
    for index, argument in enumerate(text.split(",")):
        name = re.search(r"(\w+)\s*(\[\w*\])?$", argument.strip())
        out.append(f"{name.group(1) if name else f'arg{index}'}: {_python_type(argument)}")
    return out


def functions(cdef: str) -> dict[str, tuple[str, list[str]]]:
    """Return the functions of a cdef text: name → (Python type of the result, stub parameters)."""
    flat = re.sub(r"\{[^{}]*\}", "", re.sub(r"^#.*$", "", cdef, flags=re.MULTILINE))
    found: dict[str, tuple[str, list[str]]] = {}
    for statement in flat.split(";"):
        match = _FUNCTION.match(" ".join(statement.split()))
        if match and not match.group("result").startswith("typedef"):
            found[match.group("name")] = (_python_type(match.group("result")), _arguments(match.group("args")))
    return found


def constants(cdef: str) -> list[str]:
    """Return the names of the macros and enumerators of a cdef text."""
    names = re.findall(r"^#define (\w+)", cdef, flags=re.MULTILINE)
    for body in _ENUM.findall(cdef):
        names += [item.split("=")[0].strip() for item in body.split(",") if item.strip()]
    return names


def read_cdef(source: Path) -> str:
    """Return the cdef text of the header in a directory."""
    return header_to_cdef((source / HEADER).read_text(encoding="utf-8"))


def digest(cdef: str) -> str:
    """Return a short fingerprint of a cdef text."""
    return hashlib.sha256(cdef.encode()).hexdigest()[:16]


_STUB_HEAD = '''\
# Written by packaging/extension.py from csrc/nnburst.h. Do not edit.
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

class CData:
    """A C pointer, struct or array."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: int | slice) -> Any: ...
    def __setitem__(self, index: int | slice, value: Any) -> None: ...
    def __add__(self, other: int) -> CData: ...
    def __sub__(self, other: CData) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...

class FFI:
    NULL: CData
    class error(Exception): ...

    def new(self, cdecl: str, init: Any = ...) -> CData: ...
    def new_handle(self, value: object) -> CData: ...
    def from_handle(self, handle: CData) -> Any: ...
    def cast(self, cdecl: str, source: Any) -> CData: ...
    def sizeof(self, cdecl: str | CData) -> int: ...
    def offsetof(self, cdecl: str, field: str) -> int: ...
    def addressof(self, cdata: Any, *fields: str | int) -> CData: ...
    def from_buffer(self, cdecl: str, buffer: Any, require_writable: bool = ...) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> memoryview: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def gc(self, cdata: CData, destructor: Callable[[CData], Any] | None, size: int = ...) -> CData: ...
    def typeof(self, cdecl: str | CData) -> Any: ...
    def release(self, cdata: CData) -> None: ...

def queue_calls(
    bound: tuple[int, CData, Any, type, Callable[..., Any]], probe: Any, address: int, /
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None: ...
def drop_plans(
    server: int,
    slot: int,
    plans: list[Any],
    first: int,
    stand_in: object,
    gated: dict[int, Any],
    leaving: list[Any],
    /,
) -> list[Any]: ...

class Runnable:
    pointer: CData  # _attach sets it

    def _attach(self, pointer: CData, address: int, /) -> None: ...
    def run(self, timeout: float | EllipsisType | None = ...) -> None: ...

class _Lib:
    nnb_py_header_digest: CData
'''


def _method(name: str, result: str, arguments: list[str]) -> str:
    """Return a method of the stub, broken into lines like the project's formatter does."""
    parameters = ["self", *arguments, "/"]
    one = f"    def {name}({', '.join(parameters)}) -> {result}: ..."
    if len(one) <= _LINE:
        return one
    two = f"        {', '.join(parameters)}"
    if len(two) > _LINE:
        two = "\n".join(f"        {parameter}," for parameter in parameters)
    return f"    def {name}(\n{two}\n    ) -> {result}: ..."


def stub(cdef: str) -> str:
    """Return the text of ``_nnburst.pyi``."""
    lines = [f"    {name}: int" for name in constants(cdef)]
    lines += [_method(name, *signature) for name, signature in functions(cdef).items()]
    return _STUB_HEAD + "\n".join(lines) + "\n\nffi: FFI\nlib: _Lib\n"


def make_builder(root: str) -> FFI:
    """Return an FFI ready to compile. `root` is the project directory, absolute or ``"."``."""
    source = Path(root, "csrc")
    cdef = read_cdef(source)
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    builder = FFI()
    builder.cdef(cdef + "extern const char nnb_py_header_digest[];\n")
    builder.set_source(
        "nnburst._core._nnburst",
        f'#include "{HEADER}"\n#include "_gil.h"\n#include "_module.h"\n'
        f'static const char nnb_py_header_digest[] = "{digest(cdef)}";\n',
        sources=sorted(str(path) for path in source.glob("*.c")),
        include_dirs=[str(source), str(Path(root, "nnburst", "_core"))],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if limited else [],
        py_limited_api=limited,
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"],
        extra_link_args=["-pthread"],
        libraries=["rt"],  # this library has the timer functions before glibc 2.34
    )
    return builder


def write_stub(root: str) -> None:
    """Write the stub of the module into the package."""
    path = Path(root, "nnburst", "_core", "_nnburst.pyi")
    text = stub(read_cdef(Path(root, "csrc")))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def build_in_place() -> Path:
    """Compile the module, put it into the package, and return its path."""
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    suffix = ".abi3.so" if limited else str(sysconfig.get_config_var("EXT_SUFFIX"))
    with tempfile.TemporaryDirectory(prefix=".build-", dir=CORE) as scratch:
        built = make_builder(str(ROOT)).compile(tmpdir=scratch, target=f"_nnburst{suffix}")
        target = CORE / f"_nnburst{suffix}"
        os.replace(built, target)  # the file is new, so that processes keep their mappings of the old one
    return target


if __name__ == "__main__":
    write_stub(str(ROOT))
    print(build_in_place())
elif __name__ == "__cffi__":  # setuptools needs paths relative to the directory of setup.py, where it runs this file
    where = "." if Path("csrc", "nnburst.h").exists() else str(ROOT)
    write_stub(where)
    ffibuilder = make_builder(where)
