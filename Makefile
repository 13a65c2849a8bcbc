# The one place to start; `make` lists the targets. Each works from a bare clone
# and installs what is missing first (scripts/bootstrap).
#
#   TORCH=2.15.0                 another version of torch, in separate folders
#   FLATSHARD_CUDA=auto|on|off   build the CUDA code; auto: with nvcc or a GPU
#   FLATSHARD_GPUS=native|all|"80;90a"   the GPUs to build for; native: this machine's,
#                                without one 90a
#   FLATSHARD_UNITY=ON|OFF       compile the sources of a folder together
#   JOBS=N                       parallel compilers and tests
#   SAN=address,undefined        sanitizers, for `make test` (or SAN=thread)
#   COVERAGE=on                  count the lines that run, for `make test`
#   V=1                          every compiler's line instead of a bar
#   PYTHON=3.12                  the Python that `make wheel` builds for
#   DEVICE=cpu|cuda              where the demos train; without it on GPUs if any
#   ARGS="..."                   further arguments, for the demos
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo demo-experts check test coverage build wheel docs lint format clean

FLATSHARD_CUDA ?= auto
TORCH ?=
SAN ?=
COVERAGE ?=
JOBS ?=
V ?=
PYTHON ?=
DEVICE ?=
ARGS ?=
export FLATSHARD_CUDA FLATSHARD_GPUS FLATSHARD_UNITY TORCH SAN COVERAGE JOBS V DEVICE

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

demo: ## Train a small Llama on real text, on the GPUs or over two CPU processes
	@scripts/demo $(ARGS)

demo-experts: ## The same with a model whose experts the ranks divide
	@scripts/demo --experts $(ARGS)

check: build ## Run the test cases that take at most half a second, in a minute
	@scripts/run_tests -L quick

test: build ## Run every test; SAN=address,undefined for the sanitizers
	@scripts/run_tests

coverage: ## Run every test and count lines: make test COVERAGE=on
	@$(MAKE) --no-print-directory test COVERAGE=on

build: ## Install what is missing, configure, compile
	@scripts/build

wheel: ## Build a wheel into dist/; TORCH=2.15.0 PYTHON=3.12 choose what it is for
	@FLATSHARD_PYTHON_VERSION="$(PYTHON)" scripts/wheel

docs: ## Build the documentation as a site into build/site
	@scripts/docs

lint: ## Check the format and who includes whom
	@scripts/lint

format: ## Rewrite the C++ and CUDA files in the one format
	@scripts/format

clean: ## Remove the build folders, but not .venv
	rm -rf build build-*
