# Each target creates what it needs; a second run only does what changed.
#   make demo      the main job, in a service process of its own
#   make test      the tests that are quick, in two processes; ARGS: options of pytest (-n 0: in one)
#   make check     all tests that are right beside any other programs: those, the C programs, services and faults
#   make nightly   tests that need an idle machine or many samples, one by one; ARGS: these tests
#   make weekly    tests that take minutes each, in two processes; ARGS: these tests
#   make coverage  the tests of make check, counted: what of each Python module and C file has run; ARGS: these tests
#   make bench     latencies side by side with other ways to call another process
#   make record    make bench, and put its figures into the pages; ARGS: --quick, to see that it works
#   make regress   the pytest-benchmark set, to compare one commit with another
#   make conformance-onnx  ONNX's own suite through a burst, beside onnxruntime in process
#   make exporters what scikit-learn, LightGBM, XGBoost and torch export, compared with onnxruntime in process
#   make dev       an environment with the package, its tests and its tools
#   make lint      ruff, mypy --strict, pyright (on tests/typing), clang-format, codespell
#   make format    what ruff and clang-format would write
#   make sanitize  the C tests under ASan+UBSan and TSan
#   make test-asan     the core under ASan in Python: a client in C, 100,000 messages, shapes; ARGS: other tests
#   make prove     the C core under the model checkers that are on the PATH (GenMC, Spin); ARGS: names of programs
#   make prove-mutants  the same over a core with every memory order weakened in turn
#   make lines     lines of source by room, without blanks, comments and docstrings; words of Markdown
#   make tables    the tables of the documentation that follow from the sources and from stored runs
#   make docs      the site, into docs/_build/html; a warning, or a link to nowhere, is an error
#   make wheels    sdist and one wheel for each platform, into dist/; ARGS: --only TAG
#   make release-notes TAG=vX.Y.Z  what a release brings, into dist/notes.txt; an error if it is not ready
#   make test-wheel    the unit and fault tests on the installed wheel, under each CPython on the PATH; PYTHONS: these
#   make lowest    the unit tests with the lowest versions that pyproject.toml allows; ARGS: options of pytest
#   make test-aarch64  the C tests, and the unit tests that depend on the architecture, under qemu-aarch64; ARGS: others
#   make test-musl the C tests with musl in place of glibc
#   make ext       only (re)build the C extension in place
#   make clean     remove everything that the targets above made

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

C_FILES := $(wildcard csrc/*.[ch] nnburst/_core/*.h tests/c/*.[ch] benchmarks/record/*.c)
SOURCES := $(wildcard csrc/*.c csrc/*.h nnburst/_core/*.h) packaging/extension.py
# --no-build-isolation: the build uses the setuptools and cffi of the environment, so a rebuild downloads nothing.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable

.PHONY: demo test check nightly weekly coverage bench record regress conformance-onnx exporters dev lint format sanitize test-asan prove prove-mutants lines tables docs wheels release-notes test-wheel lowest test-aarch64 test-musl ext clean

demo: $(VENV)/.stamp-ext
	$(BIN)/nnburst demo $(ARGS)

# A process that has run its half of the tests takes half of what the other one has left.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	$(PYTEST) $(ARGS)

# One red does not hide the next, and the end names them all. A line that says $(MAKE) would run in a dry run, too.
C_TESTS := $(MAKE) -j 2 -C tests/c check
check: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	@failed=; $(PYTEST) --cache-clear || failed="tests"; $(C_TESTS) || failed="$$failed C"; \
	  $(PYTEST) -m "check and not (nightly or soak or representative)" || failed="$$failed check"; \
	  test -z "$$failed" || { echo "failed: $$failed"; cat .pytest_cache/v/cache/lastfailed 2>/dev/null; exit 1; }

nightly: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n 0 -m nightly $(ARGS)

weekly: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	$(PYTEST) -m soak $(ARGS)

# Python with its child processes, then the core with the C tests. A failure stops it after the figures of Python.
coverage: $(VENV)/.stamp-ext $(VENV)/.stamp-coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 --dist worksteal -m "not (nightly or soak)" $(ARGS); status=$$?; \
	  $(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered && exit $$status
	$(MAKE) -C tests/c coverage

bench: $(VENV)/.stamp-ext $(VENV)/.stamp-bench
	$(BIN)/python -m benchmarks.record $(ARGS)
	$(BIN)/python benchmarks/waiting.py --rounds 2

record: $(VENV)/.stamp-ext $(VENV)/.stamp-bench
	mkdir -p build
	$(BIN)/python -m benchmarks.record --markdown build/record.md $(ARGS)
	$(BIN)/python docs/tables.py --store round-trips build/record.md

regress: $(VENV)/.stamp-ext $(VENV)/.stamp-bench
	$(BIN)/python -m pytest benchmarks $(ARGS)

conformance-onnx: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	$(BIN)/python tests/real_models/onnx_suite.py $(ARGS)

exporters: $(VENV)/.stamp-ext $(VENV)/.stamp-exporters
	$(BIN)/python -m pytest -m "" tests/real_models/test_onnx_exporters.py tests/real_models/test_torch_modules.py $(ARGS)

dev: $(VENV)/.stamp-ext $(VENV)/.stamp-dev

lint: $(VENV)/.stamp-ext $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/codespell
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.stamp-ext $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

sanitize:
	$(MAKE) -C tests/c check SANITIZE=address,undefined
	$(MAKE) -C tests/c check SANITIZE=thread

ASAN_TESTS = -m "" tests/faults/test_wire_client.py tests/faults/test_fuzz_messages.py \
  tests/unit/test_shapes_in_room.py tests/real_models/test_onnx_hostile.py

# A tree of its own, because what is built with ASan loads nowhere else. Leaks are what an interpreter keeps to its end.
# libstdc++ beside ASan, which looks up __cxa_throw when it is loaded: ONNX Runtime throws.
test-asan: $(VENV)/.stamp-ext $(VENV)/.stamp-test
	rm -rf build/asan && mkdir -p build/asan
	git ls-files -z | xargs -0 cp --parents -t build/asan
	cd build/asan && CFLAGS="-fsanitize=address -fno-omit-frame-pointer -g -O1" $(CURDIR)/$(BIN)/python packaging/extension.py
	cd build/asan && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$PWD $(CURDIR)/$(BIN)/python -m pytest -n 0 $(or $(ARGS),$(ASAN_TESTS))

prove:
	$(PYTHON) tests/model/prove.py $(ARGS)

prove-mutants:
	$(PYTHON) tests/model/mutate.py $(ARGS)

lines:
	@$(PYTHON) packaging/lines.py

tables: $(VENV)/.stamp-ext
	$(BIN)/python docs/tables.py $(ARGS)

docs: $(VENV)/.stamp-ext $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	$(BIN)/python docs/links.py docs/_build/html

wheels: $(VENV)/.stamp-ext $(VENV)/.stamp-wheels
	$(BIN)/python packaging/wheels.py $(ARGS)

release-notes:
	$(PYTHON) packaging/release.py $(TAG)

test-wheel: $(VENV)/.stamp-ext $(VENV)/.stamp-wheels
	$(BIN)/python packaging/installed.py $(PYTHONS:%=--python %) build/wheel $(ARGS)

lowest:
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable ".[test]"
	build/lowest/bin/python -m pytest -n 2 --dist worksteal tests/unit $(ARGS)

test-aarch64: $(VENV)/.stamp-ext $(VENV)/.stamp-wheels
	$(BIN)/python packaging/aarch64.py build/aarch64 emulator
	$(MAKE) -C tests/c check MACHINE=aarch64 EMULATOR=$(CURDIR)/build/aarch64/emulator/usr/bin/qemu-aarch64 \
	  CC="$(CURDIR)/$(BIN)/python -m ziglang cc -target aarch64-linux-musl"
	$(BIN)/python packaging/aarch64.py build/aarch64 test $(ARGS)

test-musl: $(VENV)/.stamp-ext $(VENV)/.stamp-wheels
	$(MAKE) -C tests/c check MACHINE=musl EMULATOR= CC="$(CURDIR)/$(BIN)/python -m ziglang cc -target $(shell uname -m)-linux-musl"

ext: $(VENV)/.stamp-ext

$(VENV)/.stamp-venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" "cffi>=1.17"
	touch $@

# An editable install: the package is this tree, the extension is built into it.
$(VENV)/.stamp-ext: $(VENV)/.stamp-venv pyproject.toml setup.py $(SOURCES)
	$(INSTALL) .
	touch $@

# The extras: a changed C file rebuilds the extension above, but installs no extra again (hence `|`).
$(VENV)/.stamp-test $(VENV)/.stamp-coverage $(VENV)/.stamp-bench $(VENV)/.stamp-dev $(VENV)/.stamp-wheels $(VENV)/.stamp-docs $(VENV)/.stamp-exporters: $(VENV)/.stamp-%: pyproject.toml | $(VENV)/.stamp-ext
	$(INSTALL) ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks bench-results
	rm -f nnburst/_core/_nnburst.c nnburst/_core/_nnburst.pyi nnburst/_core/_nnburst*.o nnburst/_core/_nnburst*.so
	find nnburst tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	if [ -f tests/c/Makefile ]; then $(MAKE) -C tests/c clean; fi
