# What people and CI run. Recipes are one to three lines; what grows becomes a script under scripts/.
SHELL := /bin/sh
PY := .venv/bin/python
TESTS := tests plugins
# Test processes side by side; a file runs in one of them. WORKERS=0 runs them one after the other, to debug one.
WORKERS ?= 2
GPU_TESTS := tests/gpu $(wildcard plugins/*/tests/test_gpu*.py)
# Empty where the packages come from a wheelhouse instead of .venv.
INSTALL ?= install
# Threads of numeric libraries that spin cost more than they give when several processes share few cores.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, and without kept bytecode each of them compiles our modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo demo-all tour test test-gpu test-web outside fuzz sanitize kernels image wheelhouse lint format docs bench wheels release clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: ## set up .venv with the project and every plugin, editable; does nothing when nothing changed
	@scripts/install.sh

demo: install ## start a miniature model on this machine, send it a request, show what happened, stop it
	@$(PY) scripts/demo.py

demo-all: install ## let every family's miniature do its job once: a line for each, and a picture of all
	@$(PY) scripts/demo_all.py

tour: install ## run the README's tour, the `try:` line and samples of every miniature, and all examples; ARGS="--only NAME"
	@$(PY) scripts/tour.py $(ARGS)

test: install ## run every test that needs no GPU and no network; ARGS="-k name" narrows it
	$(PY) -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --reruns 1 $(TESTS) $(ARGS)

kernels: install ## build FlashInfer's attention kernels and pack recorded Triton kernels; needs nvcc and no GPU
	@$(PY) scripts/kernels.py build/kernels/aot $(ARGS)
	@$(PY) scripts/triton_kernels.py build build/kernels/triton-kernels.tar.xz

wheelhouse: install ## gather wheels and kernels for a GPU machine without network into build/wheelhouse
	@$(PY) scripts/wheelhouse.py build/wheelhouse --cuda --kernels 9.0a $(ARGS)

test-gpu: $(INSTALL) ## run the tests that need a GPU; from a wheelhouse: make test-gpu INSTALL= PY=python3
	$(PY) -m pytest -m gpu $(GPU_TESTS) $(ARGS)

test-web: install ## run the tests of the web pages in headless Chromium; MSTAR_CHROMIUM names its binary
	MSTAR_NEED_BROWSER=1 $(PY) -m pytest -m browser tests/web $(ARGS)

outside: install ## run clients and suites that others wrote against miniatures, in environments of their own; ARGS="--only NAME"
	@$(PY) -m tests.outside $(ARGS)

fuzz: install ## fuzz what reads strangers' bytes; needs atheris (pip install atheris); ARGS="--cpu-seconds 600"
	@set -e; for target in multipart headers json bodies urls media; do $(PY) scripts/fuzz.py $$target $(ARGS); done

sanitize: $(INSTALL) ## run every own GPU kernel under compute-sanitizer; needs a GPU and the CUDA toolkit
	@$(PY) scripts/sanitize.py $(ARGS)

lint: install ## check format, lint, types, layering contracts, docs and language
	@$(PY) scripts/lint.py

format: install ## format the code and apply the fixes of the linter
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: install ## write the generated parts of the docs again
	@$(PY) scripts/docs.py

bench: install ## measure the runtime on a miniature: a report, not a gate
	@$(PY) scripts/bench.py $(ARGS)

wheels: install ## build the wheels of the project and every plugin into dist/
	@$(PY) scripts/wheels.py dist

image: ## build the container images with docker, podman or buildah, and show layers and sizes; ARGS="--target cpu --check"
	@$(PY) scripts/image.py $(ARGS)

release: ## check that version, plugins and changelogs agree, and print the commands that tag a release
	@$(PY) scripts/release.py

clean: ## remove .venv, caches and build output
	rm -rf .venv .venv.lock build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} + ; rm -rf *.egg-info plugins/*/build plugins/*/src/*.egg-info
