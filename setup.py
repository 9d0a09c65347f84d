"""Only what pyproject.toml cannot say: the cffi module, and one wheel for every CPython >= 3.10."""

import sysconfig

from setuptools import setup

# A free-threaded interpreter has no limited API; its wheel is for that version alone.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["packaging/extension.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited_api else {},
)
