# Set-up, demo and checks: everything happens in .venv, which the first target that needs it makes.
# Needs make and Python >= 3.11 with venv. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python -m
INSTALL = $(RUN) pip install --no-input --prefer-binary --constraint constraints.txt

# Debian splits ensurepip off into python3-venv; without it `python3 -m venv` fails half way.
SUITABLE = $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
CHECK_PYTHON = $(if $(shell $(SUITABLE) 2>&1 || echo no),$(error install Python 3.11 or newer \
	with venv (Debian, Ubuntu: apt install python3-venv), or name one: make PYTHON=python3.12))

# What pip compiles. For a developer, kernels that do not compile are an error wherever there is a
# compiler; for anybody else pip goes on without them.
KERNELS = CMakeLists.txt $(wildcard src/thinwire/native/csrc/*)
COMPILED = $(if $(shell command -v $(CXX) || command -v c++ || command -v clang++), \
	--config-settings=wheel.cmake=true)

# The kernels built with sanitizers (kept in build/fuzz, some minutes) and fuzzed: for how long, from
# which seed, and with which options of CMake, as THINWIRE_NAMES_v4=OFF.
SECONDS := 60
SEED := $(shell date +%s)
CONFIGURE :=
CMAKE = $(or $(shell command -v cmake),$(VENV)/bin/cmake)

.PHONY: demo test test-gpu test-wheel test-aarch64 fuzz lint clean

demo: $(VENV)/installed
	$(VENV)/bin/thinwire train $(ARGS)

test: $(VENV)/installed-dev
	$(RUN) pytest $(ARGS)

test-gpu: $(VENV)/installed-dev
	$(RUN) pytest -m gpu $(ARGS)

test-wheel: $(VENV)/installed-dev
	$(RUN) pytest tests/native/wheel.py $(ARGS)

# The kernels cross-compiled (kept in build/aarch64, a minute or more) and run by an emulator: skipped
# without g++-aarch64-linux-gnu and qemu-user-static, as Debian calls them.
test-aarch64: $(VENV)/installed-dev
	command -v cmake >/dev/null || $(RUN) pip install --no-input cmake
	$(RUN) pytest tests/native/aarch64.py $(ARGS)

# -O1: faster to compile than -O2, and to run than -O0
fuzz: $(VENV)/installed-dev
	command -v cmake >/dev/null || $(RUN) pip install --no-input cmake
	$(CMAKE) -S . -B build/fuzz -U 'THINWIRE_*' -DTHINWIRE_SANITIZE=ON \
		-DCMAKE_BUILD_TYPE=Fuzz -DCMAKE_CXX_FLAGS_FUZZ=-O1 $(addprefix -D,$(CONFIGURE))
	$(CMAKE) --build build/fuzz --parallel 2
	build/fuzz/fuzz $(SECONDS) $(SEED)

lint: $(VENV)/installed-dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache src/thinwire/native/*.so

# The stamps make pip run again only when what it reads has changed.
$(VENV)/installed: pyproject.toml constraints.txt $(KERNELS)
	$(CHECK_PYTHON)
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(KERNELS)
	$(CHECK_PYTHON)
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(COMPILED) --editable '.[dev]'
	touch $(VENV)/installed $@
