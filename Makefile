# The daily verbs. `make demo` and `make test` do all the set-up that they need.
PYTHON ?= python3
TORCH  ?= torch==2.13.0   # a GPU machine that brings its own torch: make setup TORCH=
VENV   := .venv
BIN    := $(VENV)/bin
VISION ?= torchvision==0.28.0   # the one for that torch
# Extras of every command that the README shows; the tests need more.
EXTRAS := data,fast,watch,plot,gym
DEV    := $(EXTRAS),dev,docs,onnx,lightning,transformers,searches

# timm for the tests, without what it depends on: PyPI's torchvision is made for CUDA, and beside a torch for
# the CPU it would break transformers. So it stands apart, where the tests of timm alone look for it.
define TIMM
$(BIN)/python -m pip install -q --no-deps timm
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/torchvision $(VISION)
endef

.PHONY: setup dev demo test tests long check format bench study docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install -q $(TORCH))
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

dev: $(VENV)/.dev

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install -q -e '.[$(DEV)]'
	$(if $(strip $(TORCH)),$(TIMM))
	touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/esper demo --out runs/demo

test: dev   # both at once: types take half a minute of one core where nothing is known from before
	$(MAKE) -j 2 check tests

tests: dev   # two workers, one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m docs.line_links

long: dev   # more cases of what the tests hold already
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long

bench: setup
	$(BIN)/python -m benchmarks.hot_paths

study: dev   # a small one; two tasks at a time, one thread each
	printf '%s\n' letter spirals | OMP_NUM_THREADS=1 xargs -P 2 -n 1 \
		$(BIN)/python -m studies.growth evaluate --quick --out runs/quick --task

docs: dev   # site/index.html; a broken link or a page that is left out ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist src/*.egg-info
