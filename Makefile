# The daily verbs. `make demo` and `make test` do all the set-up that they need.
PYTHON ?= python3
TORCH  ?= torch==2.13.0   # a GPU machine that brings its own torch: make setup TORCH=
VENV   := .venv
BIN    := $(VENV)/bin
VISION ?= torchvision==0.28.0   # the one for that torch
LOCK   ?= constraints.txt   # exact versions of the set-up; the newest that fit: make setup LOCK=
# Extras of every command that the README shows; the demo needs none of them, the tests more.
EXTRAS := data,fast,watch,plot,gym
DEV    := $(EXTRAS),dev,docs,onnx,lightning,transformers,searches,rates
# Modules are compiled when they are first imported: most of what is installed never is.
# What is compiled is kept in the environment, also where PYTHONDONTWRITEBYTECODE is set: else every process of the
# tests and of the demo compiles torch anew, three seconds each.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
PIP    := $(BIN)/python -m pip install --no-compile $(addprefix -c ,$(LOCK))

# timm for the tests, without what it depends on: PyPI's torchvision is made for CUDA, and beside a torch for
# the CPU it would break transformers. So it stands apart, where the tests of timm alone look for it.
define TIMM
$(PIP) -q --no-deps timm
	$(PIP) -q --no-deps --upgrade --target $(VENV)/torchvision $(VISION)
endef

.PHONY: setup dev lock demo test tests long check format bench study docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml $(LOCK) | $(BIN)/python
	$(PIP) $(TORCH) -e .
	touch $@

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(LOCK) | $(BIN)/python
	$(PIP) $(TORCH) -e '.[$(EXTRAS)]'
	touch $(VENV)/.demo $@

dev: $(VENV)/.dev

$(VENV)/.dev: pyproject.toml $(LOCK) | $(BIN)/python
	$(PIP) $(TORCH) -e '.[$(DEV)]'
	$(if $(strip $(TORCH)),$(TIMM))
	touch $(VENV)/.demo $(VENV)/.ready $@

lock: dev   # what is installed now, but for torch, which a machine chooses
	{ echo '# Exact versions for `make setup`, `make demo` and `make test`; made by `make lock LOCK=`'; \
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(torch|triton|nvidia-.*)==' \
	| grep -v ' @ '; } > constraints.txt

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/python -m studies.demo --out runs/demo

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long -o faulthandler_timeout=3600

bench: setup
	$(BIN)/python -m benchmarks.hot_paths

study: dev   # a small one; two tasks at a time, one thread each
	printf '%s\n' letter spirals | OMP_NUM_THREADS=1 xargs -P 2 -n 1 \
		$(BIN)/python -m studies.growth evaluate --quick --out runs/quick --task

docs: dev   # site/index.html; a broken link or a page that is left out ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist src/*.egg-info
