# make demo, make test: both set up .venv by themselves.  PYTHON= picks the interpreter that makes the
# environment (3.11 or newer); PY= uses an environment of yours instead.
PYTHON ?= python3
VENV ?= .venv
ifdef PY
setup:
else
PY := $(VENV)/bin/python
setup:
	@$(PYTHON) codegen/bootstrap.py $(VENV)
endif

ARCH ?= sm_90a
FILTER ?= *
BENCH ?= h200-table
# CUDA major that precompile and bundle build for, 12 or 13; the driver's, or the newest, if empty
CUDA ?=
flavour = $(if $(CUDA),--cuda $(CUDA))

.PHONY: setup demo test precompile matrix try lint bench bundle profile docs
.DEFAULT_GOAL := demo

demo: setup  ## a realistic decode job, checked and timed
	$(PY) -m snapmla.demo

test: setup  ## compile the matrix, run the tests
	$(PY) -m pytest --precompile -n 2

precompile: setup  ## build the default matrix: ARCH=sm_90a CUDA=13 FILTER='*'
	$(PY) -m codegen precompile --arch $(ARCH) $(flavour) --filter '$(FILTER)'

bundle: precompile  ## pack what a server without the compiler needs: ARCH= CUDA= FILTER=
	$(PY) -m codegen bundle --arch $(ARCH) $(flavour) --filter '$(FILTER)'

matrix: setup  ## print the matrix with reasons: ARCH=sm_90a
	$(PY) -m codegen matrix --arch $(ARCH)

try: setup  ## recompile and check one variant: VARIANT=decode_etap_r64_p64_obf16_sm90a
	$(PY) -m codegen try $(VARIANT)

profile: setup  ## Nsight Compute on one variant, as one table: VARIANT=decode_etap_r64_p64_obf16_sm90a
	$(PY) -m profiles.ncu $(VARIANT)

docs: setup  ## write what the docs generate: variants, API, byte maps, picture, the README's numbers
	$(PY) -m codegen docs && $(PY) docs/render.py && $(PY) docs/figures.py

lint: setup  ## ruff and mypy
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

bench: setup  ## measure on a GPU: BENCH=preset
	$(PY) -m profiles.bench $(BENCH)
