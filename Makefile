# make run     set up, prepare the default model, serve on port 8080   (DEVICE=cuda: on a GPU)
# make test    set up, run all tests
# make setup   the virtual environment alone      make model   the default model alone
# make lint    ruff and mypy                      make bench   measure a running server
# make lint-image  the Dockerfiles, deploy/ and every pinned version      make sbom  into sbom/
# make faults  every fault at every place: minutes
# make image   build the Dockerfile (TARGET=runtime|with-model, IMAGE=name, BUILD_OPTIONS=...)
# make image-test  build it without Docker or GPU on stand-in bases, check what it claims: minutes
# make baseline  first token, tokens/s and memory, plain against quantized: minutes

PYTHON ?= python3
DEVICE ?= auto
PORT ?= 8080

# One environment per ONNX Runtime wheel: the CPU and the GPU wheel own the same import name.
ifeq ($(DEVICE),cuda)
VENV ?= .venv-gpu
RUNTIME := requirements-gpu.txt
else
VENV ?= .venv
RUNTIME := requirements-cpu.txt
# One version, so that the index in use need not be searched; any that requirements.txt admits works.
TORCH ?= torch==2.13.0
endif

BIN := $(VENV)/bin
# Its own environment: the linters' packages are not the server's.
LINT := .venv-lint
DEFAULT_MODEL := models/default/quantization.json
export ORT_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Docker, or podman (which keeps a HEALTHCHECK in Docker's format only).
ENGINE ?= $(firstword $(notdir $(shell command -v docker podman)))
export BUILDAH_FORMAT := docker
IMAGE ?= phi-serve:latest
TARGET ?= runtime

.PHONY: run test faults setup model lint lint-image sbom bench baseline image image-test clean
.DELETE_ON_ERROR:

# With MODEL_PATH=FOLDER that folder is served, and no default model is prepared.
run: $(VENV)/.run-installed $(if $(MODEL_PATH),,$(DEFAULT_MODEL))
	exec $(BIN)/python -m app

# Two processes, each with whole files: what a file's tests share is made once.
test: $(VENV)/.dev-installed $(DEFAULT_MODEL)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

faults: $(VENV)/.dev-installed
	ALL_FAULTS=1 $(BIN)/python -m pytest tests/test_faults.py tests/test_faults_model.py

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-image: $(VENV)/.dev-installed $(LINT)/.installed
	LINT=$(LINT) KUBECTL=$(BIN)/kubectl scripts/lint_image.sh
	$(BIN)/python scripts/check_pins.py

# The packages of each image; sbom/ is not kept in git.
sbom: $(VENV)/.dev-installed $(LINT)/.installed
	LINT=$(LINT) UV=$(BIN)/uv scripts/sbom.sh sbom

setup: $(VENV)/.dev-installed

model: $(DEFAULT_MODEL)

bench: $(VENV)/.run-installed
	$(BIN)/python scripts/bench.py --url http://127.0.0.1:$(PORT) --concurrency 1,8,32

# The tutorial's table, printed and written. What else it takes: BASELINE_OPTIONS="--repeats 1".
baseline: $(VENV)/.run-installed $(DEFAULT_MODEL)
	$(BIN)/python scripts/compare_baseline.py $(BASELINE_OPTIONS) \
		--page docs/measurements/plain-against-quantized.md \
		--json docs/measurements/plain-against-quantized.json

image:
	$(if $(ENGINE),,$(error neither docker nor podman is here))
	$(ENGINE) build --target $(TARGET) --tag $(IMAGE) \
		--build-arg REVISION=$(shell git rev-parse HEAD) $(BUILD_OPTIONS) .

image-test: $(VENV)/.run-installed $(DEFAULT_MODEL)
	PYTHON=$(BIN)/python TORCH=$(TORCH) scripts/image_test.sh

# A stamp is written last, so an interrupted installation is taken up again.
$(VENV)/.run-installed: requirements.txt $(RUNTIME) requirements-build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(TORCH) -r $(RUNTIME)
	$(BIN)/python -m pip install --no-deps -r requirements-build.txt
	touch $@

$(VENV)/.dev-installed: $(VENV)/.run-installed requirements-dev.txt requirements-tracing.txt requirements-triton.txt
	$(BIN)/python -m pip install -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps -r requirements-triton.txt
	touch $@

$(LINT)/.installed: requirements-lint.txt
	$(LINT)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(LINT)
	$(LINT)/bin/python -m pip install -r requirements-lint.txt
	touch $@

# Not rebuilt when the environment changes: the folder says what made it.
$(DEFAULT_MODEL): | $(VENV)/.run-installed
	$(BIN)/python -m quantize default --output models/default

clean:
	rm -rf .venv .venv-gpu .venv-lint sbom models .mypy_cache .pytest_cache .ruff_cache
