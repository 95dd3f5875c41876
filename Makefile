# The verbs of this project. `make train` and `make test` set up what they need on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train results results-page reproduce reproduce-gpu bench test test-fast test-slow test-gpu test-oldest campaigns check docs notebooks
.DEFAULT_GOAL := test

setup: .venv/ready

.venv/ready: requirements.txt pyproject.toml tests/fetch_transformers_tests.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --requirement requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/python tests/fetch_transformers_tests.py
	touch $@

# The main job: generated sounds, tiny encoders, no download. ARGS="--svr none" passes options on.
train: setup
	$(BIN)/accelerate launch recipes/train_supclap.py $(ARGS)

# The two runs of docs/results.md: make results DATA=folder-of-ESC-10
results: setup
	rm -rf outputs/results
	$(BIN)/accelerate launch recipes/train_supclap.py --output_dir outputs/results/synthetic
	$(BIN)/accelerate launch recipes/train_supclap.py recipes/configs/esc10.yaml --data_dir $(DATA) \
		--output_dir outputs/results/esc10

# The papers' tables at scale mini, about a minute of one core a run: make reproduce TABLES="supclap/table3 atri/table3"
# DATA=folder-of-ESC-10 adds real recordings. What is finished is not run again.
TABLES := supclap/table3 supclap/figure1 supclap/figure3 supclap/table7 atri/table3
DATA_DIR = $(if $(DATA),--data_dir $(DATA))
reproduce: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m modeling_supclap.recipes.reproduce $(TABLES) $(DATA_DIR) $(ARGS)

# The tables of docs/results.md and of the README, from the committed files of recipes/results.
results-page: setup
	$(BIN)/python -m modeling_supclap.recipes.results_page
	$(BIN)/python -m modeling_supclap.recipes.settings_page

# All of them on a GPU within 40 minutes; says so where there is none.
reproduce-gpu: setup
	bash recipes/reproduce_gpu.sh $(DATA_DIR) $(ARGS)

# Costs as ratios, each beside its peer in one run: one table, also in benchmarks/results.md. ARGS="--only step" for a part.
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ARGS)

# Training on a GPU: clips a second, achieved TFLOP/s and memory of the papers' models.
bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py $(ARGS)

test: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)

# Everything that starts no process.
test-fast: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m "not process and not slow and not gpu" $(ARGS)

test-slow: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu $(ARGS)

# Kills, broken input, hostile files, small disks, two writers: what tests/campaigns/RESULTS.md keeps. Half an hour; the
# disks want root, to mount them.
CAMPAIGN := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/campaigns HF_HOME=$(abspath .cache/campaigns/hf) $(BIN)/python
campaigns: setup
	rm -rf .cache/campaigns && mkdir -p .cache/campaigns/kills .cache/campaigns/hostile .cache/campaigns/disks .cache/campaigns/writers
	$(CAMPAIGN) tests/campaigns/kills.py --kills 200 --folder .cache/campaigns/kills
	$(CAMPAIGN) tests/campaigns/fuzz.py --inputs 20000 --folder .cache/campaigns/fuzz
	$(CAMPAIGN) tests/campaigns/hostile.py --folder .cache/campaigns/hostile
	$(CAMPAIGN) tests/campaigns/disks.py --trials 30 --folder .cache/campaigns/disks
	$(CAMPAIGN) tests/campaigns/writers.py --trials 20 --folder .cache/campaigns/writers

# The oldest transformers and huggingface_hub that pyproject.toml allows, in front of those of .venv.
OLDEST := .cache/oldest
test-oldest: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(OLDEST) --no-deps \
		transformers==5.17.0 huggingface_hub==1.31.0 httpx==0.28.1 httpcore==1.0.9
	PYTHONPATH=$(OLDEST) $(BIN)/python tests/fetch_transformers_tests.py
	HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath $(OLDEST)) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" tests $(ARGS)

# Tests are checked where they say their types; of what pytest hands to them, most do not. A cache of its own: other rules
# make mypy forget what it knows of the package.
TESTS_AS_TYPED := --no-check-untyped-defs --allow-incomplete-defs --exclude 'tests/[a-z]*/conftest.py' --cache-dir .mypy_cache/tests
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $(TESTS_AS_TYPED) tests

# The site, in site/index.html; a link that leads nowhere is an error. Neither building nor reading needs the network.
# Its search wants a server: python -m http.server -d site
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Runs the notebooks anew and keeps what they print and draw; they ask the model that `make train` leaves.
notebooks: setup
	PYTHONWARNINGS=ignore TQDM_DISABLE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 \
		$(BIN)/jupyter-execute --inplace examples/*.ipynb
