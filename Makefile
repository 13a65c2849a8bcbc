# The one place to start; `make` lists the targets. Each works from a bare clone
# and installs what is missing first (scripts/bootstrap).
#
#   FLATSHARD_CUDA=auto|on|off   build the CUDA code; auto: when nvcc fits torch
#   JOBS=N                       parallel compilers and tests
#   SAN=address,undefined        sanitizers, for `make test` (or SAN=thread)
#   ARGS="..."                   further arguments, for `make demo`
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test coverage build lint format clean

FLATSHARD_CUDA ?= auto
SAN ?=
JOBS ?=
ARGS ?=
export FLATSHARD_CUDA SAN JOBS

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

demo: build ## Train a small Llama on real text over two processes
	@scripts/demo $(ARGS)

test: build ## Run every test; SAN=address,undefined for the sanitizers
	@scripts/run_tests

coverage: ## Which lines of flatshard/ the tests run; fails below 90 %
	@scripts/coverage

build: ## Install what is missing, configure, compile
	@scripts/build

lint: ## Check the format and who includes whom
	@scripts/lint

format: ## Rewrite the C++ and CUDA files in the one format
	@scripts/format

clean: ## Remove the build folders, but not .venv
	rm -rf build build-san build-coverage build-wheel
