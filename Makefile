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

.PHONY: setup demo test prove precompile matrix try lint bench bundle profile docs
.DEFAULT_GOAL := demo

demo: setup  ## a realistic decode job, checked and timed
	$(PY) -m snapmla.demo

test: setup  ## compile the test set of variants, run the tests
	$(PY) -m pytest --precompile -n 2

## SLICE    part of the steps, such as 2/8
## LIMIT    seconds after which no step begins
## ONLY     glob over names of steps
prove: setup  ## what make test leaves out, in steps that go on: SLICE=2/8 LIMIT=600 ONLY='mutants:*'
	$(PY) -m profiles.prove $(if $(SLICE),--slice $(SLICE)) $(if $(LIMIT),--limit $(LIMIT)) \
	  $(if $(ONLY),--only '$(ONLY)')

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

docs: setup  ## write what the docs generate: variants, API, byte maps, the README's numbers
	$(PY) -m codegen docs && $(PY) docs/render.py

lint: setup  ## ruff and mypy
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

bench: setup  ## measure on a GPU: BENCH=preset
	$(PY) -m profiles.bench $(BENCH)
