# Common tasks. Each target installs the environment first if it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup requirements train results results-page reproduce reproduce-gpu bench bench-large bench-gpu test test-fast test-slow test-gpu test-processors test-oldest test-newest coverage campaigns mutants check docs notebooks
.DEFAULT_GOAL := test

setup: .venv/ready

.venv/ready: requirements.txt pyproject.toml setup.py .ci/install tests/fetch_transformers_tests.py
	PYTHON=$(PYTHON) .ci/install
	touch $@

# Write the newest versions that pyproject.toml allows, with all packages that they require and the hashes of their files, for
# Python 3.11 or later on any system. Run `make test-newest` before, which tries these versions.
requirements: setup
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --generate-hashes --no-annotate \
		--custom-compile-command "make requirements" pyproject.toml --output-file requirements.txt

# Default training: generated sounds, tiny encoders, no download. ARGS="--svr none" passes options.
train: setup
	$(BIN)/supclap train $(ARGS)

# The two runs of docs/results.md: make results DATA=folder-of-ESC-10
results: setup
	rm -rf outputs/results
	$(BIN)/supclap train --output_dir outputs/results/synthetic
	$(BIN)/supclap train esc10.yaml --data_dir $(DATA) --output_dir outputs/results/esc10

# The papers' tables at scale mini, about a minute on one core per run: make reproduce TABLES="supclap/table3 atri/table3"
# DATA=folder-of-ESC-10 adds real recordings. Finished runs are not repeated.
TABLES := supclap/table3 supclap/figure1 supclap/figure3 supclap/table7 atri/table3
DATA_DIR = $(if $(DATA),--data_dir $(DATA))
reproduce: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m modeling_supclap.recipes.reproduce $(TABLES) $(DATA_DIR) $(ARGS)

# Write docs/studies/ and docs/paper_settings.md from the committed files of recipes/studies.
results-page: setup
	$(BIN)/python -m modeling_supclap.recipes.studies.pages

# All tables at scale mini on a GPU, stopped after 40 minutes; an error without a GPU.
reproduce-gpu: setup
	bash recipes/studies/reproduce_gpu.sh $(DATA_DIR) $(ARGS)

# Costs as ratios to a baseline measured in the same run; the table is benchmarks/results.md. ARGS="--only step" runs a part.
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ARGS)

# A search index of a million windows, beside FAISS if it is installed: a row of benchmarks/results.md.
bench-large: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_search.py --rows 1000000

# Training the papers' models on a GPU beside a plain loop: clips per second, TFLOP/s, memory. On a CPU: counts of operator calls.
bench-gpu: setup
	$(BIN)/python benchmarks/run.py --only gpu --output benchmarks/results-gpu.md

test: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

# All tests that start no process.
test-fast: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not process and not slow and not gpu" $(ARGS)

test-slow: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu $(ARGS)

# Killed processes, broken input, hostile files, small disks, two writers, live folders and servers: the runs of tests/campaigns/RESULTS.md. They take
# half an hour; the disks need root, to mount them.
CAMPAIGN := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/campaigns HF_HOME=$(abspath .cache/campaigns/hf) $(BIN)/python
campaigns: setup
	rm -rf .cache/campaigns && mkdir -p .cache/campaigns/kills .cache/campaigns/hostile .cache/campaigns/disks .cache/campaigns/writers .cache/campaigns/live
	$(CAMPAIGN) tests/campaigns/kills.py --kills 200 --folder .cache/campaigns/kills
	$(CAMPAIGN) tests/campaigns/fuzz.py --inputs 20000 --folder .cache/campaigns/fuzz
	$(CAMPAIGN) tests/campaigns/hostile.py --folder .cache/campaigns/hostile
	$(CAMPAIGN) tests/campaigns/odd_files.py --folder .cache/campaigns/odd_files
	$(CAMPAIGN) tests/campaigns/disks.py --trials 30 --folder .cache/campaigns/disks
	$(CAMPAIGN) tests/campaigns/writers.py --trials 20 --folder .cache/campaigns/writers
	$(CAMPAIGN) tests/campaigns/live.py --trials 20 --folder .cache/campaigns/live

# `make test`, with a table of the lines that no test runs in htmlcov/; an error below the share of [tool.coverage.report].
coverage: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" --cov --cov-report=html $(ARGS)

# Change single expressions of the library at random, and count the changes that no test notices; an hour on two cores. The first
# run records which test runs which line, in the copy mutants/; another seed uses it again. ARGS="--faults 50 --seed 3"
mutants: setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python tests/campaigns/mutants.py $(ARGS)

# The numerical tests with the arithmetic of other processors, with one and two threads, and with noise in the last digits of products
# and Fourier transforms.
PROCESSOR_TESTS = HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m pytest -n 2 --dist loadfile -m "not process and not slow and not gpu" \
	tests/conversion tests/evaluation tests/integrations tests/losses tests/metrics tests/model tests/search tests/training modeling_supclap $(ARGS)
test-processors: setup
	MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(PROCESSOR_TESTS)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(PROCESSOR_TESTS)
	OMP_NUM_THREADS=1 $(PROCESSOR_TESTS) -p rounding_noise

# Tests with the oldest transformers and huggingface_hub that pyproject.toml allows, placed before those of .venv.
OLDEST := .cache/oldest
test-oldest: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(OLDEST) --no-deps \
		transformers==5.17.0 huggingface_hub==1.31.0 httpx==0.28.1 httpcore==1.0.9
	PYTHONPATH=$(OLDEST) $(BIN)/python tests/fetch_transformers_tests.py
	HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" tests $(ARGS)

# The whole suite with the newest versions that pyproject.toml allows (torch, transformers, datasets, accelerate, peft, PyAV ...), in an
# environment of its own; it prints them. PYTHON=python3.13 chooses the interpreter.
NEWEST := .cache/newest
test-newest: setup
	$(BIN)/uv venv --quiet --clear --seed --python $(PYTHON) $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --upgrade --all-extras --requirement pyproject.toml
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --no-deps --editable .
	$(NEWEST)/bin/python tests/fetch_transformers_tests.py
	$(BIN)/uv pip list --python $(NEWEST)/bin/python
	HF_HUB_OFFLINE=1 $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

# mypy checks tests only where they have annotations; most fixtures have none. A separate cache, because other rules would
# invalidate the cache of the package.
TESTS_AS_TYPED := --no-check-untyped-defs --allow-incomplete-defs --exclude 'tests/[a-z]*/conftest.py' --cache-dir .mypy_cache/tests
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $(TESTS_AS_TYPED) tests

# The site, in site/index.html; a broken link is an error. Building and reading it need no network.
# Its search needs a server: python -m http.server -d site
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Run the notebooks and save their output; they use the model of `make train`.
notebooks: setup
	PYTHONWARNINGS=ignore TQDM_DISABLE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 \
		$(BIN)/jupyter-execute --inplace examples/*.ipynb
