# make demo, make test: both set up .venv by themselves.  `make help` lists targets and variables, from
# the texts behind ## here; a target's example names the variables that it reads.

## PYTHON   interpreter that makes the environment, 3.11 or newer
PYTHON ?= python3
## VENV     the environment that is made
VENV ?= .venv
## PY       interpreter of an environment of yours; nothing is set up then
ifdef PY
setup:
else
PY := $(VENV)/bin/python
setup:  ## make the environment: TORCH_INDEX=
	@$(PYTHON) codegen/bootstrap.py $(VENV)
endif
## TORCH_INDEX  package index that setup looks at for torch too: PyTorch's own for CPU has builds of
##          200 MB without CUDA (the selector on pytorch.org names it)
export TORCH_INDEX

## ARCH     architecture that kernels are built for: sm_90a or sm_100a
ARCH ?= sm_90a
## FILTER   globs over variant names, by commas or spaces; `snapmla needs` prints what a model needs
FILTER ?= *
## KIND     kind of kernels that precompile and wheels take, helper or decode; all if empty. A kind's wheel
##          has a name of its own: decode is installed beside helper
KIND ?=
## MACHINE  CPU of the servers that wheels' kernels are for, aarch64; this machine's if empty
MACHINE ?=
## BENCH    preset of shapes: h200-table, helpers, ... (profiles/shapes.py has them)
BENCH ?= h200-table
## CUDA     major that precompile, bundle and wheels build for, 12 or 13; the driver's, or the newest, if empty
CUDA ?=
flavour = $(if $(CUDA),--cuda $(CUDA))
kind = $(if $(KIND),--kind $(KIND))
machine = $(if $(MACHINE),--machine $(MACHINE))

## VARIANT  name of one variant, as `make matrix` lists them
ifneq (,$(filter try profile,$(MAKECMDGOALS)))
ifeq (,$(VARIANT))
$(error VARIANT= names no variant: make $(firstword $(filter try profile,$(MAKECMDGOALS))) \
VARIANT=decode_etap_r64_p64_obf16_sm90a (`make matrix` lists them))
endif
endif

# Tests and builds start a hundred Python processes: where nobody may write bytecode each compiles
# our sources anew.  `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test prove precompile matrix try lint bench bundle wheels release profile docs clean distclean
.DEFAULT_GOAL := demo

help:  ## print this
	@echo "make TARGET [VARIABLE=value ...]; the target is demo if none is named"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables:"
	@sed -n 's/^## /  /p' $(MAKEFILE_LIST)

demo: setup  ## a realistic decode job, checked and timed
	$(PY) -m profiles.demo

test: setup  ## compile the test set of variants, run the tests
	$(PY) -m pytest --precompile -n 2 --dist loadfile

## SLICE    part of the steps, such as 2/8
## LIMIT    seconds after which no step begins
## ONLY     glob over names of steps
prove: setup  ## what make test leaves out, in steps that go on: SLICE=2/8 LIMIT=600 ONLY='mutants:*'
	$(PY) -m profiles.prove $(if $(SLICE),--slice $(SLICE)) $(if $(LIMIT),--limit $(LIMIT)) \
	  $(if $(ONLY),--only '$(ONLY)')

precompile: setup  ## build the default matrix: ARCH=sm_90a CUDA=13 FILTER='*' KIND=
	$(PY) -m codegen precompile --arch $(ARCH) $(flavour) $(kind) --filter '$(FILTER)'

bundle: precompile  ## pack what a server without the compiler needs: ARCH= CUDA= FILTER=
	$(PY) -m codegen bundle --arch $(ARCH) $(flavour) --filter '$(FILTER)'

wheels: precompile  ## build wheels of the host package and of the variants: ARCH= CUDA= FILTER= KIND= MACHINE=
	$(if $(MACHINE),$(PY) -m codegen cross --arch $(ARCH) $(flavour) $(kind) $(machine) --filter '$(FILTER)')
	$(PY) -m codegen wheels --arch $(ARCH) $(flavour) $(kind) $(machine) --filter '$(FILTER)'

matrix: setup  ## print the matrix with reasons: ARCH=sm_90a
	$(PY) -m codegen matrix --arch $(ARCH)

try: setup  ## recompile one variant, run it with the hazard check: VARIANT=decode_etap_r64_p64_obf16_sm90a
	$(PY) -m codegen try $(VARIANT)
	$(PY) -m snapmla.testing run --hazards collect $(VARIANT)

## ARCHS    architectures of a release, by commas
## CUDAS    CUDA majors of a release, by commas
## MACHINES CPUs of a release, by commas
release: setup  ## build and check what a release uploads: ARCHS= CUDAS= MACHINES= FILTER='*'
	$(PY) -m codegen release $(if $(ARCHS),--arch $(ARCHS)) $(if $(CUDAS),--cuda $(CUDAS)) \
	  $(if $(MACHINES),--machine $(MACHINES)) --filter '$(FILTER)'

profile: setup  ## Nsight Compute on one variant, as one table: VARIANT=decode_etap_r64_p64_obf16_sm90a
	$(PY) -m profiles.ncu $(VARIANT)

docs: setup  ## write what the docs generate: variants, API, byte maps, pictures, the README's numbers
	$(PY) -m codegen docs && $(PY) docs/render.py && $(PY) docs/figures.py && $(PY) docs/plots.py

lint: setup  ## ruff and mypy
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

bench: setup  ## measure on a GPU: BENCH=preset
	$(PY) -m profiles.bench $(BENCH)

clean:  ## remove what was built (build/: variants, bundles, wheels, measurements) and caches; not $(VENV)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find snapmla snapmla_cli codegen dsl_kernels softgpu profiles tests docs -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove $(VENV)
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then echo "rm -rf $(VENV)"; rm -rf "$(VENV)"; fi
