# Two commands on a fresh Debian 12: `make demo` and `make test`. Each sets up what is missing (Debian packages,
# .venv, pinned Python packages, compiled extensions) and is fast when nothing is. `make help` lists the rest.
SHELL   := /bin/bash
BIN     := .venv/bin
PYTEST  := $(BIN)/python -m pytest --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadscope
# What the caller has set for himself must not reach pip, setup.py or pytest. (Without .pyc files each of the hundreds of
# processes that tests start would compile our modules anew.)
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE FLOWCHECK_BUILD

SOURCES := setup.py $(wildcard parser/*.p[yx][xdi] updater/*.p[yx][xd] flowcheck/*/*.p[yx][xd] flowcheck/*/*/*.p[yx][xd] \
           */include/*.h */src/*.[ch] lab/*/*.p[yx][xd] lab/*/*/*.[ch] flowcheck/*/*/*/*.[ch] \
           dataplane/pydpdk/_build.py dataplane/pydpdk/shim.[ch] dataplane/pydpdk/decl/*.h)
MODE    := $(if $(filter 1,$(FLOWCHECK_DEBUG)),debug,release)

.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-sanitizers lint fuzz mutants soak screenshots build debug dev wheel packages hugepages clean

help:   ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

demo: build hugepages   ## train, mirror, follow on this machine (needs root; else: replay captures)
	$(BIN)/python -P tools/demo.py --lab pcaps/ring2-ll pcaps/ring4-simple

test: build dev hugepages   ## everything a merge needs: lint, types, layers, tests (skips say why)
	$(PYTEST) -m "not slow"

test-sanitizers: build dev   ## dataplane and parser under AddressSanitizer and ThreadSanitizer (compiles both: 10 minutes)
	@tools/sanitize.sh address && tools/sanitize.sh thread

test-all: build dev hugepages; $(PYTEST)   ## the same and the slow tests

lint: build dev   ## ruff, mypy and the layer rules
	$(BIN)/python -m pytest tests/project/test_lint.py tests/project/test_layers.py

fuzz: build dev   ## ten million inputs, as many records and requests, capture files, streams to a real node (docs/understand/fuzzing.md)
	nice $(BIN)/python -P fuzz/run.py && nice $(BIN)/python -P fuzz/captures.py && nice $(BIN)/python -P fuzz/ports.py && FUZZ_STREAMS=200000 nice $(BIN)/python -m pytest -q -s -m slow tests/flowcheck/node/test_fuzz_records.py

mutants: build dev   ## deliberate mistakes, and whether a test notices (docs/understand/testing.md); ONLY="MODULE ..." for some
	$(BIN)/python -m pip install -q -c constraints.txt mutmut
	nice $(BIN)/python -P tools/mutants.py $(ONLY)
soak: build; $(BIN)/flowcheck lab soak --minutes $(or $(MINUTES),30)   ## training with losses and faults, MINUTES=30 (docs/use/lab.md)
screenshots: build; $(BIN)/python tools/screenshots.py   ## the node's status page in a headless Chromium, for docs/use
lost-picture: build dev; $(BIN)/python tools/lost_picture.py   ## nodes are lost in the lab and come back from parity, drawn for docs/use
gpu-demo:; @tools/gpu-demo.sh   ## NCCL on this machine's GPU, mirrored and followed (docs/use/gpu-demo.md)
build: .venv/.built-$(MODE)   ## Debian packages, .venv and the extensions, in place
debug:; $(MAKE) build FLOWCHECK_DEBUG=1   ## extensions with C assertions, bounds checks and line tracing for coverage
dev: .venv/.installed-dev   ## what tests need more: compilers, a switch, second opinions, Python packages
wheel: .venv/.installed   ## dist/flowcheck-*.whl: what a training environment needs, without a compiler (docs/use/install.md)
	FLOWCHECK_BUILD=trainer $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir $(or $(DIST),dist) .

packages:; @tools/apt-packages.sh run
hugepages:; @tools/hugepages.sh 256

.venv/.installed: constraints.txt pyproject.toml | packages
	@tools/python-packages.sh node,switch,lab "two or three minutes, most of it torch"
	touch $@

.venv/.installed-dev: .venv/.installed
	@tools/apt-packages.sh test && tools/python-packages.sh node,switch,lab,plan,dev "a minute"
	touch $@

.venv/.built-$(MODE): .venv/.installed $(SOURCES)
	@echo "flowcheck: compiling, usually one or two minutes"
	FLOWCHECK_DEBUG=$(FLOWCHECK_DEBUG) $(BIN)/python setup.py -q build_ext --inplace -j 2 $(if $(wildcard .venv/.built-$(MODE)),,--force)
	rm -f .venv/.built-*
	touch $@

clean:   ## remove what was built (keeps .venv; remove that by hand)
	rm -rf build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv/.built-*
	find dataplane parser updater flowcheck -name '*.so' -delete
