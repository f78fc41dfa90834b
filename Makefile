# Each target does all its set-up in .venv; the first run downloads a few hundred megabytes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS := benchmarks/results
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: help demo serve test check newest bench gpu clean

help:
	@echo "make demo    stream a real recording through a real server and score the words"
	@echo "make serve   keep the server and the microphone page up at http://127.0.0.1:8300"
	@echo "make test    check, then every test"
	@echo "make check   format, lint, types, and who imports whom"
	@echo "make newest  the tests with other people's clients, in the newest versions that install"
	@echo "make bench   the figures in benchmarks/, in about two hours"
	@echo "make gpu     the figures of the megakernel and of Parakeet, on an NVIDIA GPU, in about twenty minutes"
	@echo "make clean   remove .venv, .clients and caches"

# $(1) is the result's name, $(2) the script and its arguments; a result is replaced only once it is whole.
measure = $(BIN)/python -m benchmarks.$(2) > $(VENV)/bench.md && mv $(VENV)/bench.md $(RESULTS)/$(1).md

demo: $(VENV)/.run
	$(BIN)/python -m gateway demo

serve: $(VENV)/.run
	$(BIN)/python -m gateway serve

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A process for each core, up to eight, each with one thread for torch; who runs out of tests takes half of another's.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

newest: $(VENV)/.dev
	CLIENTS=newest $(BIN)/python -m pytest tests/conformance

bench: $(VENV)/.bench
	$(call measure,ingest,ingest)
	$(call measure,doors,doors)
	$(call measure,door_requests,door_texts --model spelling)
	$(call measure,door_texts,door_texts)
	$(call measure,turns,turns)
	$(call measure,vad_gate,vad_gate)
	$(BIN)/python -m benchmarks.whisper_offline --model whisper-tiny.en --write
	$(BIN)/python -m benchmarks.whisper_offline --model whisper-base --write
	$(BIN)/python -m benchmarks.borders --save
	$(call measure,streaming_policies,streaming_policies)
	$(call measure,streaming_tiny.en,streaming --model whisper-tiny.en --streams 2)
	$(call measure,streaming_tiny.en_4_at_once,streaming --model whisper-tiny.en --streams 4 --interval-ms 1000 --every 4)
	$(call measure,streaming_base,streaming --model whisper-base --streams 2)

gpu: $(VENV)/.gpu
	$(call measure,decoder_step,decoder_step)
	$(call measure,decoder_step_small,decoder_step --model small --compiled --no-generate)
	$(call measure,decoder_step_medium,decoder_step --model medium --compiled --no-generate)
	$(call measure,decoder_step_large-v3,decoder_step --model large-v3 --compiled --no-generate)
	$(call measure,megakernel_parts,megakernel_parts)
	$(call measure,sm_split,sm_split)
	$(call measure,request_latency,request_latency)
	$(call measure,cold_start,cold_start)
	$(call measure,partials_cost,partials_cost)
	$(call measure,parity,parity $(addprefix --recordings ,$(wildcard ../shared/audio)))
	$(call measure,soak,soak --model tiny.en --steps 1000000 --stalls 10 --max-seconds 150)
	$(call measure,tdt_step,tdt_step)
	$(call measure,parakeet_encoder,parakeet_encoder)
	$(call measure,parakeet_capacity,parakeet_capacity --servers 8 --backend torch-cuda)

clean:
	rm -rf $(VENV) .clients build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# One stamp for each set of packages; a change of the pins or of the list installs anew.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV); the first time takes some minutes"
	$(PIP_INSTALL) --editable '.[hub]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP_INSTALL) --editable '.[hub,dev]'
	@touch $@

$(VENV)/.gpu: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[hub,dev,gpu]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[hub,dev,bench]'
	@touch $@
