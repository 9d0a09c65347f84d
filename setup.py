"""Only what pyproject.toml cannot say: the cffi module, one wheel for every CPython >= 3.11, and the package's page."""

import os
import runpy
import sysconfig
from pathlib import Path

from setuptools import setup

# A free-threaded interpreter has no limited API; its wheel is for that version alone.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

root = Path(__file__).resolve().parent
page = runpy.run_path(str(root / "packaging" / "page.py"))
tag = "v" + runpy.run_path(str(root / "nnburst" / "_version.py"))["VERSION"]
url = os.environ.get("NNBURST_URL", "").rstrip("/")

setup(
    cffi_modules=["packaging/extension.py:ffibuilder"],
    long_description=page["links"]((root / "README.md").read_text("utf-8"), url, tag),
    long_description_content_type="text/markdown",
    project_urls=page["addresses"](url, tag),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited_api else {},
)
