# make demo       the demonstration, on the GPU if there is one, else on the CPU
# make test       ruff, clang-format, mypy, and the quick tests of tests/cpu; needs no GPU
# make test-ci    the same with one in eight of the thorough tests: what CI runs
# make test-all   the same with every test of tests/cpu
# make test-gpu   pytest tests/gpu, on a machine with a CUDA device
# make test-matrix   the quick tests on several versions of torch, and a table of them
# make docs       the documentation as a site, in site/
# make format     let ruff and clang-format rewrite the sources
# make clean      remove what the targets above made, the virtual environment included
#
# Each target sets itself up: it needs python3 (>= 3.10, with its venv module), g++ and make, and
# makes a virtual environment in .venv with the versions of constraints.txt.
#
# USE_SYSTEM=1 (or VENV=system) installs nothing and runs with $(PYTHON) as it is. That is also
# what happens by itself where no .venv is there and $(PYTHON) already sees a CUDA device.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

STAMP := $(VENV)/.tconv-installed
CLANG_FORMAT = -c 'import sys, clang_format; sys.exit(clang_format.clang_format())'
SOURCES = $(shell find src tests -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

ifeq ($(VENV),system)
USE_SYSTEM := 1
endif
ifndef USE_SYSTEM
ifeq ($(wildcard $(STAMP)),)
USE_SYSTEM := $(shell $(PYTHON) -c "import cuda.bindings, numpy, rich, skimage, torch; \
                      print(int(torch.cuda.is_available()))" 2>/dev/null)
endif
endif

ifeq ($(USE_SYSTEM),1)
SETUP :=
RUN := PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
$(info Running with $(PYTHON) as it is; nothing is installed.)
else
SETUP := $(STAMP)
RUN := $(VENV)/bin/python
endif

.PHONY: help demo test test-ci test-all lint types test-cpu test-cpu-quick test-gpu test-matrix docs format setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//; 1,/^$$/p; /^PYTHON/q' Makefile | head -n 8

setup: $(SETUP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'tconv needs Python 3.10 or newer')"
	@echo "Setting up $(VENV) (about a minute; longer where torch comes with CUDA) ..."
	@$(PYTHON) -m venv $(VENV)
	@quiet=-qq; if [ -t 1 ]; then quiet=; fi; \
	  $(VENV)/bin/python -m pip install $$quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable ".[cuda13,test,dev,demo]"
	@touch $(STAMP)

demo: $(SETUP)
	@$(RUN) -m tconv demo $(ARGS)

test: lint types test-cpu-quick

test-ci: ARGS += --thorough=8
test-ci: lint types test-cpu

test-all: lint types test-cpu

# Where nothing may be installed, a missing ruff or mypy is said and passed over.
tool = if [ "$(USE_SYSTEM)" = 1 ] && ! $(RUN) -c "import $(1)" 2>/dev/null; \
  then echo "$(1): not installed for $(PYTHON), left out"; else $(RUN) $(or $(3),-m $(1)) $(2); fi

lint: $(SETUP)
	@$(call tool,ruff,check)
	@$(call tool,ruff,format --check)
	@$(call tool,clang_format,--dry-run --Werror $(SOURCES),$(CLANG_FORMAT))
	@! grep -nE '^.{101,}' $(SOURCES) || { echo "lines of more than 100 columns"; exit 1; }

types: $(SETUP)
	@$(call tool,mypy)

test-cpu: $(SETUP)
	@$(RUN) -m pytest tests/cpu -n $(JOBS) $(ARGS)

test-cpu-quick: $(SETUP)
	@$(RUN) -m pytest tests/cpu -n $(JOBS) -m "not thorough" $(ARGS)

test-gpu: $(SETUP)
	@TESTS_NEED_GPU=1 $(RUN) -m pytest tests/gpu $(ARGS)

# It makes virtual environments of its own, in build/matrix. ARGS="--help" tells more.
test-matrix:
	@$(PYTHON) tests/matrix.py $(ARGS)

# The site needs no torch: mkdocstrings reads the sources. It has a virtual environment of its own.
DOCS_STAMP := .venv-docs/.tconv-installed

ifeq ($(origin USE_SYSTEM),command line)
docs: DOCS_RUN = $(RUN)
docs:
else
docs: DOCS_RUN = .venv-docs/bin/python
docs: $(DOCS_STAMP)
endif
	@rm -rf build/pages && mkdir -p build/pages
	@cp -r --parents README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs benchmarks/results build/pages
	@NO_MKDOCS_2_WARNING=1 $(DOCS_RUN) -m mkdocs build --strict --quiet
	@echo "site/index.html"

$(DOCS_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt mkdocs mkdocs-material "mkdocstrings[python]"
	@touch $@

format: $(SETUP)
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format
	@$(RUN) $(CLANG_FORMAT) -i $(SOURCES)

clean:
	rm -rf $(if $(filter system,$(VENV)),,$(VENV)) .venv-docs demo-output build dist site \
	  .mypy_cache .pytest_cache .ruff_cache .hypothesis
