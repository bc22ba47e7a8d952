# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
#
#   PYTHON=…   the Python to make the environment with, or to use as it is when VENV is empty
#   VENV=      use PYTHON's own environment: nothing is downloaded (for machines without a network)
#   JOBS=…     test processes, and cells of the demo that are made at a time

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
MATRIX ?= .matrix

ifeq ($(strip $(VENV)),)
  PY := $(PYTHON)
  READY := .venv-none.stamp
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/.ready
endif
# What the demo needs alone, where the whole environment has not been made.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(READY:.ready=.demo-ready))

.PHONY: demo test test-all slice engines forms fuzz mutants lint bench bench-docs site site-version package hub clean

# The demo's problems: of the quick set one for each operation, on every chip. DEMO='*' makes the whole quick set.
DEMO ?= dense causal fp16*,varlen_attention,*_backward,decode_attention,paged_attention,sparse_attention,mla_attention,append_kv,write_pages

demo: $(DEMO_READY)
	$(PY) -m portattn doctor
	$(PY) -m portattn matrix run --quick --ops '$(DEMO)' --jobs $(JOBS) --out $(MATRIX)
	$(PY) -m portattn matrix report $(MATRIX)
	@echo "The page: $(MATRIX)/index.html"

# The fast tier, all tests that tests/slow.txt does not list; ARGS="tests/kernels -k mask" runs tests of both tiers.
test: $(READY)
	$(PY) -m pytest -n $(JOBS) $(or $(ARGS),--tier=fast)

# The tests that `make test` leaves out. tests/tiers.py says how tests/slow.txt is written.
test-all: $(READY)
	$(PY) -m pytest -n $(JOBS) --tier=slow $(ARGS)

# Other compilers: environments of the lab, cells of the matrix compiled in them (Ascend's executed on this CPU), and probes.
SLICE = --toolchain triton==3.2.0 --toolchain triton==3.4.0 --toolchain triton==3.9.0 --toolchain triton-ascend==3.2.0

slice: $(READY)
	$(PY) -m portattn lab create $(subst --toolchain ,,$(SLICE))
	$(PY) -m portattn matrix run --quick $(SLICE) --targets cuda:sm_90,rocm:gfx942,ascend:ascend910b2 --out $(MATRIX)-slice
	$(PY) -m portattn quirks probe any-0001 any-0002 cuda-0007 cuda-0014 rocm-0015 rocm-0218 ascend-0006 ascend-0008 $(SLICE)
	$(PY) -m portattn quirks audit

# The adapters' tests, each against the real engine in an environment of its own (scripts/engine_env.py), made where it is
# not there. Whatever cannot be made within ENGINE_SECONDS is named and left out; a test that fails fails the target, and
# so does a run that tested no engine.
# ENGINES="vllm==0.31.0 sglang==0.5.23": others than the newest of each.
ENGINES ?= $(shell $(PY) scripts/engine_env.py list --newest)
ENGINE_SECONDS ?= 600

engines: $(READY)
	@failed=; left=; tested=; for engine in $(ENGINES); do \
	  $(PY) scripts/engine_env.py make $$engine --seconds $(ENGINE_SECONDS); status=$$?; \
	  if [ $$status -eq 0 ]; then \
	    tested="$$tested $$engine"; \
	    $(PY) scripts/engine_env.py test $$engine -q $(ARGS) || failed="$$failed $$engine"; \
	  elif [ $$status -eq 3 ]; then left="$$left $$engine"; \
	  else exit $$status; fi; \
	done; \
	[ -z "$$left" ] || echo "engines: no environment could be made, and no test was run, of:$$left" >&2; \
	[ -z "$$failed" ] || { echo "engines: tests failed of:$$failed" >&2; exit 1; }; \
	[ -n "$$tested" ] || { echo "engines: nothing was tested" >&2; exit 3; }

# Every form of the Hopper variants, compiled for sm_90: registers and spills, against what is known of the release
# (tests/backends/cuda/gluon_spills.toml). About fifteen minutes on two cores. RELEASE=3.9.0: by the Triton of that release
# in the lab, not by the installed one. WRITE=1: what is found is what is known from then on.
forms: $(READY)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(PY) tests/backends/cuda/forms_gate.py --jobs $(JOBS) $(if $(RELEASE),--release $(RELEASE)) $(if $(WRITE),--write) $(ARGS)

# A kernel repository for Hugging Face `kernels`: docs/flash-attn.md. ARGS="--variants torch-cuda"
hub: $(READY)
	PYTHONPATH="$(CURDIR):$(PYTHONPATH)" $(PY) scripts/hub_kernel.py --out .hub/portattn $(ARGS)

# ARGS="values --seconds 600 --processes 2", or shapes: CONTRIBUTING.md
fuzz: $(READY)
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(PY) -m fuzz $(or $(ARGS),values)

# Faults put into the code, which tests must notice (docs/testing.md).
mutants: $(READY)
	$(PY) scripts/mutants.py $(ARGS)

# From another folder. A name without a slash is looked for on PATH.
HERE = $(if $(findstring /,$(PY)),$(if $(filter /%,$(PY)),$(PY),"$(CURDIR)/$(PY)"),$(PY))

lint: $(READY) site
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	@# The installed layout, by links: mypy does not read the mapping of backends/ to portattn.backends.
	rm -rf .lint && mkdir -p .lint/portattn
	ln -s "$(CURDIR)"/portattn/* "$(CURDIR)/backends" "$(CURDIR)/quirks" .lint/portattn/
	cd .lint && $(HERE) -m mypy --config-file ../pyproject.toml -p portattn
	@# Modules that have a stub beside them, which mypy reads otherwise.
	cd .lint && $(HERE) -m mypy --config-file ../pyproject.toml portattn/integrations/flash_attn/flash_attn_interface.py \
	    portattn/integrations/flash_attn_interface.py
	@# Who may import whom: the contracts of pyproject.toml.
	cd .lint && PYTHONPATH=. $(HERE) -c 'from importlinter.cli import lint_imports_command as run; run()' --config ../pyproject.toml --no-cache
	@# Modules, names, sentences, lines: none of the numbers of scripts/budgets.toml may rise.
	cd .lint && PYTHONPATH=. $(HERE) ../scripts/budgets.py

# SETS="dense18 decode": which sets; BENCH="--core-only --budget 600 --peer sdpa": any further options.
SETS ?= seed
BENCH ?=

bench: $(READY)
	$(PY) -m portattn bench $(addprefix --set ,$(SETS)) $(BENCH) --out .bench

# docs/performance/ from the run in .bench: its results, and the plots made from them (needs matplotlib).
bench-docs: $(READY)
	mkdir -p docs/performance
	cp .bench/bench.json docs/performance/results.json
	$(PY) -m portattn bench report docs/performance/results.json --plots docs/performance/plots > /dev/null

# The documentation site, .site/html/index.html (extra `docs`). A dead link or anchor, a page that is not in the navigation
# and an API name that is not found fail the build. The pages lie in .site/pages as in the repository, by links; those made
# from data (the quirks' catalogue and verification, the tables of figures) are added by scripts/site_pages.py.
# site-version commits the site of this version to the branch gh-pages, beside those of other versions, and pushes nothing.
VERSION = $(shell sed -n 's/__version__ = "\(.*\)"/\1/p' portattn/version.py)
PAGES = README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE docs examples

site site-version: $(READY)
	rm -rf .site && mkdir -p .site/pages
	ln -s $(foreach page,$(PAGES),"$(CURDIR)/$(page)") .site/pages/
	NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR):$(PYTHONPATH)" PATH="$(dir $(PY)):$$PATH" \
	  $(if $(filter site,$@),$(PY) -m mkdocs build,mike deploy --update-aliases $(VERSION) latest)

# The sdist, the wheel made from it, and a call and commands of the wheel installed in an environment of its own.
package: $(READY)
	rm -rf dist .package
	$(PY) -m build --no-isolation .
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv .package
	.package/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd / && "$(CURDIR)/.package/bin/python" -c \
	  'import torch, portattn; q = torch.randn(1, 8, 16, 32); portattn.attention(q, q, q, causal=True); print(portattn.last_plan())'
	.package/bin/python -m pip install -q -c constraints.txt "$$(echo dist/*.whl)[tools]"
	cd / && "$(CURDIR)/.package/bin/portattn" doctor
	cd / && "$(CURDIR)/.package/bin/portattn" quirks audit

$(VENV)/.ready: EXTRAS := tools,test,lint,package,docs,transformers
$(VENV)/.demo-ready: EXTRAS := tools,triton
$(VENV)/.ready $(VENV)/.demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt setuptools wheel torch triton
	$(VENV)/bin/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

# An existing Python with torch, Triton and portattn's other dependencies: only portattn itself is linked in, nothing is fetched.
.PHONY: .venv-none.stamp
.venv-none.stamp:
	@$(PY) -c 'import importlib.util as u, sys; \
	  missing = [m for m in "torch numpy msgspec platformdirs filelock click rich jinja2 packaging tomlkit".split() if not u.find_spec(m)]; \
	  sys.exit("this Python lacks " + ", ".join(missing) + ": install them, or leave VENV= out" if missing else 0)'
	@$(PY) -c 'import os; os.chdir("/"); import portattn.quirks, portattn.backends' 2>/dev/null || { \
	  $(PY) -c 'import packaging.version as v, setuptools as s, sys; \
	    sys.exit("setuptools 77.0.3 or newer is needed" if v.Version(s.__version__) < v.Version("77.0.3") else 0)' && \
	  $(PY) -m pip install -q --no-deps --no-build-isolation --no-index -e .; }

clean:
	rm -rf .venv .lint .package .site .hub .matrix .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
