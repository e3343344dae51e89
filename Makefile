# make demo   a tiny LTX-Video on this machine, stock and with kernels, and the video that it draws
# make test   the tests that this machine can run
# make docs   the API reference, from the docstrings, in build/api
# make test-all   those, long random runs on every model, and every guard taken out once; hours on two cores
#
# All make a virtual environment, install what they need and build the kernels this machine has
# compilers for. Variables:
#   PYTHON=python3.12           the interpreter of the virtual environment
#   TORCH='torch==2.11.0'       the torch to install
#   VENV=.venv                  where the virtual environment lives
#   TESTS='tests/ops -k norm'   what `make test` runs

PYTHON ?= python3
TORCH ?= torch>=2.11
VENV ?= .venv
TESTS ?= tests

BIN := $(VENV)/bin
BUILD_TOOLS := 'setuptools>=77' wheel ninja
EXTRAS := diffusers,examples,hub,test,docs,dev

# Another TORCH is another installation; the stamp carries its name.
INSTALLED := $(VENV)/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
BUILD_INPUTS := $(wildcard pyproject.toml setup.py setup_kernels.py) $(shell find csrc diffkern/build -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test test-all test-gpu fuzz docs lint format install clean

# Threads that spin while they wait take minutes more where another program runs on the same cores.
demo: $(INSTALLED)
	@echo "The tiny LTX-Video draws one video with each arm that this machine has: two minutes on two cores."
	OMP_WAIT_POLICY=passive $(BIN)/python examples/ltx_video/generate_video.py --tiny --compare --steps 8 --warmup-iterations 1 \
		--output outputs/demo.mp4 --json outputs/demo.json --chart outputs/demo.png

# One thread per process: the processes already fill the cores.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m 'not gpu' $(TESTS)

# Writes what it ran and found into benchmarks/test_all.json.
test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/test_all.py

# Random calls of every op against float64, for as long as wanted: make fuzz SECONDS=600 DEVICE=cuda
SECONDS ?= 60
DEVICE ?= cpu
fuzz: $(INSTALLED)
	$(BIN)/python scripts/fuzz_ops.py --seconds $(SECONDS) --device $(DEVICE)

# In one process: the tests measure and share one card.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(TESTS)

# A warning is an error.
docs: $(INSTALLED)
	$(BIN)/python scripts/write_api_reference.py build/api

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

$(INSTALLED): $(BUILD_INPUTS)
	@echo "Installing into $(VENV), with torch (6 GB with CUDA), and building kernels: 5 to 8 minutes on two cores."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(BUILD_TOOLS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$(EXTRAS)]' '$(TORCH)'
	rm -f $(VENV)/installed-*
	touch $@

clean:
	rm -rf $(VENV) build dist outputs *.egg-info diffkern/_kernels
