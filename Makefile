# SPDX-License-Identifier: Apache-2.0
# gpufence. `make help` lists what there is. Everything that is built lies in dist/.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

DIST    := $(CURDIR)/dist
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -X github.com/gpufence/gpufence/enforcer/api.BuildVersion=$(VERSION)
GOBUILD := go build -trimpath -ldflags "$(LDFLAGS)"
# GOTESTFLAGS=-v prints every test; GPUFENCE_MUST=1 turns a skip of something that this machine can do into a failure.
GOTESTFLAGS ?=
GOTEST  := GPUFENCE_DIST=$(DIST) go test $(GOTESTFLAGS)
DEPS    := packaging/deps.sh
# How long each fuzz target runs, and each soak.
FUZZTIME ?= 30s
SOAK_SECONDS ?= 60
SOAK_CRASHES ?= 500
SIM_SEEDS ?= 20

# Of the shim's builds for others than this machine's own programs.
SHIM_NEEDS  := arm64-cc arm64-libc arm64-qemu
# Of the commands that run with the shim as without.
UNCHANGED_NEEDS = $(shell sed -n 's/^packages = \[\(.*\)\]/\1/p' tests/unchanged/commands.toml | tr -d '",' | tr ' ' '\n' | sort -u | sed 's/^/package:/')
# Of the images that containers are started from.
IMAGES_NEEDS := musl runc busybox
BUILD_NEEDS := cc libc make git binutils certificates
RUN_NEEDS   := $(BUILD_NEEDS) runc busybox

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## install the Debian packages that are missing (says which; without apt it names them)
	@$(DEPS) $(RUN_NEEDS)

.PHONY: build build-go build-shim build-simgpu build-clients build-hardware
build: ## build everything into dist/
	@$(DEPS) $(BUILD_NEEDS)
	@$(MAKE) build-go build-shim build-simgpu build-clients build-hardware

build-go:
	@mkdir -p $(DIST)/bin
	CGO_ENABLED=0 $(GOBUILD) -o $(DIST)/bin/ ./cmd/gpufence ./cmd/gpufence-runtime ./cmd/gpufence-hook ./cmd/gpufence-nri ./cmd/gpufence-agent ./cmd/kubectl-gpufence
	CGO_ENABLED=1 $(GOBUILD) -o $(DIST)/bin/ ./cmd/gpufenced
	@# The engine is the suffix of the name that the wrapper is started by.
	@for engine in cri crio docker podman; do ln -sfn gpufence-runtime $(DIST)/bin/gpufence-runtime.$$engine; done

build-shim:
	@$(MAKE) -C shim all OUT=$(DIST)

build-simgpu:
	@mkdir -p $(DIST)/bin
	CGO_ENABLED=0 $(GOBUILD) -o $(DIST)/bin/ ./tests/simgpu/cmd/...
	@$(MAKE) -C tests/simgpu all OUT=$(DIST)

build-clients:
	@$(MAKE) -C tests/clients all OUT=$(DIST)

build-hardware:
	@mkdir -p $(DIST)/bin
	CGO_ENABLED=0 $(GOBUILD) -o $(DIST)/bin/ ./tests/hardware/cmd/test-gpu ./tests/bench
	@$(MAKE) -C tests/hardware all OUT=$(DIST)

.PHONY: demo
demo: ## hold three containers to their GPU memory limits, on the simulated GPU where there is no real one
	@$(DEPS) $(RUN_NEEDS)
	@$(MAKE) build >$(CURDIR)/.demo-build.log 2>&1 || { cat $(CURDIR)/.demo-build.log; exit 1; }; rm -f $(CURDIR)/.demo-build.log
	@$(DIST)/bin/gpufence demo

.PHONY: test test-go test-sim test-shim test-enforcer test-e2e
test: ## every test: unit, property, fuzz seeds, shim under sanitizers, model checks, end to end
	@$(DEPS) $(RUN_NEEDS)
	@$(MAKE) build
	@failed=; for suite in test-go test-sim test-shim test-enforcer test-e2e; do \
	  start=$$SECONDS; word=; $(MAKE) $$suite || { failed="$$failed $$suite"; word=" failed after"; }; \
	  echo "suite $$suite:$$word $$((SECONDS - start)) s"; done; \
	  [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-go: # without systemd-analyze the units' test is skipped, by name
	@$(DEPS) --try systemd-analyze || [ $$? = 3 ]
	$(GOTEST) $$(go list ./... | grep -v -e /enforcer/ -e /tests/simgpu -e /tests/coverage -e /tests/killfuzz -e /tests/e2e -e /tests/unchanged -e /tests/images -e /tests/k8s -e /tests/chart/render -e /tests/canary -e /tests/enforcer -e /tests/hostile -e /tests/vm -e /tests/engines -e /tests/packages -e /tests/foreign -e /tests/hardware)

test-sim:
	$(GOTEST) ./tests/simgpu/...
	@$(MAKE) -C tests/simgpu test OUT=$(DIST)
	@$(MAKE) -C tests/clients test OUT=$(DIST)

test-shim:
	@failed=; for part in library coverage builds images unchanged asan tsan; do \
	  start=$$SECONDS; word=; $(MAKE) test-shim-$$part || { failed="$$failed $$part"; word=" failed after"; }; \
	  echo "suite test-shim $$part:$$word $$((SECONDS - start)) s"; done; \
	  [ -z "$$failed" ] || { echo "test-shim failed:$$failed"; exit 1; }

# On all cores, unless whoever called make has said on how many.
TOGETHER = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))
.PHONY: test-shim-library test-shim-coverage test-shim-builds test-shim-unchanged test-shim-images test-shim-asan test-shim-tsan
test-shim-library:
	@$(MAKE) -C shim $(TOGETHER) test OUT=$(DIST)
test-shim-coverage: # every function that takes memory, with its table; and killed while at it
	@# The one waits for gpufenced most of its time, and the other for its killed.
	@$(GOTEST) -count=1 -v ./tests/killfuzz >$(DIST)/killfuzz.txt 2>&1 & killed=$$!; failed=0; \
	  $(GOTEST) -count=1 ./tests/coverage || failed=1; wait $$killed || failed=1; cat $(DIST)/killfuzz.txt; exit $$failed
	@cat $(DIST)/shim-coverage.md
test-shim-builds:
	@status=0; $(DEPS) --try $(SHIM_NEEDS) || status=$$?; \
	  case $$status in 0) $(MAKE) -C shim $(TOGETHER) test-builds OUT=$(DIST) ;; 3) ;; *) exit 1 ;; esac
test-shim-unchanged: # what is missing then is skipped by the test, by name
	@$(DEPS) --try $(UNCHANGED_NEEDS) || [ $$? = 3 ]
	$(GOTEST) -count=1 -parallel 3 ./tests/unchanged
test-shim-images:
	@$(DEPS) --try $(IMAGES_NEEDS) || [ $$? = 3 ]
	$(GOTEST) -count=1 ./tests/images
test-shim-asan:
	@$(MAKE) -C shim $(TOGETHER) test-asan OUT=$(DIST)
test-shim-tsan:
	@$(MAKE) -C shim $(TOGETHER) test-tsan OUT=$(DIST)

# The daemon and its parts, then the built gpufenced: who dies and who does not, 25 crashes under load, attacks.
test-enforcer:
	$(GOTEST) -race $$(go list ./enforcer/... | grep -v -e /enforcer/kube/ -e '/enforcer/kube$$')
	@# Without the race detector, which would have all of client-go compiled once more; make soak has it.
	$(GOTEST) ./enforcer/kube/...
	$(GOTEST) -count=1 -parallel 6 ./tests/enforcer ./tests/hostile

test-e2e:
	$(GOTEST) -count=1 ./tests/e2e/... ./tests/canary
	@# make test-gpu on the simulated GPU, as its own test.
	$(GOTEST) -count=1 ./tests/hardware

# Of Python's packages. Another Python than Debian's may do: the script that brings them says so where none does.
CLIENTS_NEEDS := package:python3-pip

.PHONY: test-clients
test-clients: ## NVIDIA's headers, and clients that we did not write, on the simulated GPU; they are downloaded once
	@$(DEPS) $(RUN_NEEDS)
	@$(DEPS) --try $(CLIENTS_NEEDS) || [ $$? = 3 ]
	@# The network brings the packages while the processors build.
	@start=$$SECONDS; { tests/foreign/get $(DIST)/foreign && tests/foreign/get-npm $(DIST)/foreign && echo "suite test-clients packages: $$((SECONDS - start)) s"; } & packages=$$!; built=0; \
	  { $(MAKE) build-go build-shim build-clients && $(MAKE) -C tests/simgpu foreign OUT=$(DIST) && echo "suite test-clients build: $$((SECONDS - start)) s"; } || built=$$?; \
	  wait $$packages; exit $$built
	@start=$$SECONDS; word=; $(GOTEST) -count=1 -parallel 3 -timeout 60m ./tests/foreign || word=" failed after"; \
	  echo "suite test-clients clients:$$word $$((SECONDS - start)) s"; [ -z "$$word" ]

# Where the modules are, everything is built anew; else what was built before is run.
TEST_GPU_FLAGS ?=
.PHONY: test-gpu test-gpu-folder
test-gpu: ## the suites on a real GPU, and what its driver does; report in dist/gpu-report.md (TEST_GPU_FLAGS=--help)
	@if [ -x $(DIST)/test-gpu/run ] && ! GOPROXY=off go list -deps ./cmd/gpufenced ./tests/hardware/... >/dev/null 2>&1; then \
	  echo "test-gpu: no Go with our modules here: what was built before is run"; \
	else $(MAKE) test-gpu-folder; fi
	@$(DIST)/test-gpu/run --out $(DIST) $(TEST_GPU_FLAGS)

test-gpu-folder: ## dist/test-gpu, for a machine that cannot build: its `run` needs root, and nothing else of here
	@$(DEPS) $(BUILD_NEEDS)
	@$(MAKE) build
	@$(MAKE) -C shim bench OUT=$(DIST)
	@tests/hardware/bundle $(DIST) $(DIST)/test-gpu

.PHONY: test-chart
test-chart: ## helm over the chart: lint, wrong values, and packaging/kubernetes is what it renders
	@tests/programs/build helm >/dev/null
	$(GOTEST) -count=1 ./tests/chart/...

# Beside what everything runs with.
K8S_NEEDS := package:iproute2

.PHONY: test-k8s
test-k8s: ## a real Kubernetes with simulated GPUs on this machine; its programs are built once, outside the work tree
	@$(DEPS) $(RUN_NEEDS) $(K8S_NEEDS)
	@start=$$SECONDS; tests/programs/build kubernetes containerd crictl cni helm >/dev/null; echo "suite test-k8s programs: $$((SECONDS - start)) s"
	@$(MAKE) build
	@start=$$SECONDS; word=; $(GOTEST) -v -count=1 -timeout 20m ./tests/k8s || word=" failed after"; \
	  echo "suite test-k8s cluster:$$word $$((SECONDS - start)) s"; [ -z "$$word" ]

# dockerd is Debian's; nothing is started by installing it, or must not be.
ENGINES_NEEDS := package:podman package:docker.io package:conmon

.PHONY: test-engines
test-engines: ## containerd 1.7 and 2, Docker, Podman and no engine at all, with the same steps; and the commands in docs/
	@$(DEPS) $(RUN_NEEDS)
	@$(DEPS) --try $(ENGINES_NEEDS) || [ $$? = 3 ]
	@start=$$SECONDS; tests/programs/build containerd1 containerd crictl >/dev/null; \
	  tests/engines/crio/build >/dev/null || echo "test-engines: CRI-O cannot be built here: its part says so"; echo "suite test-engines programs: $$((SECONDS - start)) s"
	@$(MAKE) build
	@failed=; \
	  start=$$SECONDS; word=; GPUFENCE_ENGINES=1 $(GOTEST) -count=1 -run TestLoaders ./cmd/gpufence/cli || { failed=1; word=" failed after"; }; \
	  echo "suite test-engines loaders:$$word $$((SECONDS - start)) s"; \
	  start=$$SECONDS; word=; $(GOTEST) -v -count=1 -timeout 20m ./tests/engines || { failed=1; word=" failed after"; }; \
	  echo "suite test-engines engines:$$word $$((SECONDS - start)) s"; [ -z "$$failed" ]

# Of the guests: an emulator, Debian's kernels, and the stand-in driver that is built for them.
VM_NEEDS := package:qemu-system-x86 package:kmod package:xz-utils package:dwarves package:crun

.PHONY: test-vm
test-vm: ## the gate in emulated machines with Debian's kernels (fetched once, outside the work tree), cgroup v2 only
	@$(DEPS) $(RUN_NEEDS) $(VM_NEEDS)
	@start=$$SECONDS; for k in oldest newest; do tests/vm/kernel $$k >/dev/null; done; echo "suite test-vm kernels: $$((SECONDS - start)) s"
	@$(MAKE) build
	@start=$$SECONDS; word=; $(GOTEST) -v -count=1 -timeout 40m ./tests/vm || word=" failed after"; \
	  echo "suite test-vm guests:$$word $$((SECONDS - start)) s"; [ -z "$$word" ]

BPF_NEEDS := package:clang-16 package:llvm-16 package:libbpf-dev

.PHONY: bpf
bpf: ## compile the gate's programs anew into bpf/, which is committed
	@$(DEPS) $(BPF_NEEDS)
	@bpf/generate
	@tests/bench/gateload/generate

.PHONY: lint-bpf
lint-bpf: # where the compiler is: what is committed is what the source gives
	@if command -v clang-16 >/dev/null && command -v llvm-strip-16 >/dev/null; then out=$$(mktemp -d); \
	  bpf/generate $$out >/dev/null && tests/bench/gateload/generate $$out >/dev/null && \
	  cmp $$out/bench_bpfel.o tests/bench/gateload/bench_bpfel.o && cmp $$out/bench_bpfel.go tests/bench/gateload/bench_bpfel.go && cmp $$out/gate_bpfel.o bpf/gate_bpfel.o && cmp $$out/gate_bpfel.go bpf/gate_bpfel.go || { echo "lint-bpf: run make bpf" >&2; exit 1; }; rm -rf $$out; \
	else echo "lint-bpf: SKIP, no clang-16 here"; fi

.PHONY: lint
lint: ## Go, C and shell lints, house rules, formatting
	@$(DEPS) $(BUILD_NEEDS) shellcheck
	@mkdir -p $(DIST)/tools
	cd .ci/tools && go build -o $(DIST)/tools/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	$(DIST)/tools/golangci-lint run --allow-parallel-runners ./...
	$(DIST)/tools/golangci-lint fmt --diff
	shellcheck packaging/deps.sh tests/hardware/bundle packaging/nfpm/*.sh packaging/nfpm/after-upgrade tests/packages/root.sh tests/programs/build tests/engines/crio/build tests/unchanged/enter.sh tests/images/fetch.sh tests/vm/kernel tests/foreign/get tests/foreign/get-npm bpf/generate tests/bench/gateload/generate .ci/run
	@$(MAKE) lint-bpf
	@$(MAKE) -C shim lint
	@$(MAKE) -C tests/simgpu lint
	@$(MAKE) -C tests/clients lint
	@$(MAKE) -C tests/hardware lint

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (30s) each
	@$(DEPS) $(BUILD_NEEDS)
	@for pkg in $$(go list ./...); do \
	  for target in $$(go test -list '^Fuzz' $$pkg 2>/dev/null | grep '^Fuzz' || true); do \
	    echo "fuzz $$pkg $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; done

.PHONY: bench
bench: ## measure us side by side with the alternative; table, and dist/bench.json
	@$(DEPS) $(RUN_NEEDS)
	@$(MAKE) build
	@$(MAKE) -C shim bench OUT=$(DIST)
	go run ./tests/bench --dist $(DIST)

.PHONY: sim
sim: ## 20 simulated nodes of 16 GPUs, 1,000 containers, 10,000 processes over 4 virtual hours each, on the pure core
	GPUFENCE_SIM_SEEDS=$(SIM_SEEDS) GPUFENCE_SIM_GPUS=16 GPUFENCE_SIM_MINUTES=240 go test -count=1 -v -timeout 120m -run TestNode ./tests/simnode

.PHONY: soak soak-ledger soak-crash soak-vm soak-docker soak-packages soak-quadlet
soak: soak-ledger soak-crash soak-vm soak-docker soak-packages soak-quadlet ## the long runs: kill fuzz of the ledger, crashes of gpufenced, the demo's steps again and again
	@$(DEPS) $(RUN_NEEDS)
	$(GOTEST) -race ./enforcer/kube/...
	$(GOTEST) -count=5 -timeout 60m ./tests/e2e/...

soak-ledger: ## 16 processes on one ledger for 60 s, 64 on all of the API for 10,000 kills: it must sum to 0, no reserve above 100 ms
	@$(DEPS) $(BUILD_NEEDS)
	@$(MAKE) build-shim
	@$(MAKE) -C shim soak OUT=$(DIST) SECONDS=$(SOAK_SECONDS)
	@$(MAKE) build-simgpu build-clients
	GPUFENCE_KILLS=10000 $(GOTEST) -count=1 -v -timeout 30m ./tests/killfuzz

soak-crash: ## SIGKILL gpufenced 500 times under load: nothing lost, nobody killed wrongly, nothing left
	@$(DEPS) $(BUILD_NEEDS)
	@$(MAKE) build
	GPUFENCE_CRASHES=$(SOAK_CRASHES) $(GOTEST) -count=1 -v -timeout 120m -run TestCrash ./tests/enforcer

soak-vm: ## all of the enforcer's tests in a guest with cgroup v2 only
	@$(DEPS) $(RUN_NEEDS) $(VM_NEEDS)
	@$(MAKE) build
	GPUFENCE_GUEST_LONG=1 $(GOTEST) -v -count=1 -timeout 150m -run TestNode ./tests/vm

soak-docker: ## Docker's and Compose's newest, built from their modules, and Debian's Docker, with the same steps
	@$(DEPS) $(RUN_NEEDS) package:docker.io
	@tests/programs/build containerd docker compose >/dev/null
	@$(MAKE) build
	GPUFENCE_DOCKER=current $(GOTEST) -count=1 -v -timeout 20m -run TestCurrentDocker ./tests/engines

soak-packages: ## the units of the package under a real systemd: watchdog, reload, restart and stop under a container
	@$(DEPS) $(BUILD_NEEDS) $(PACKAGE_NEEDS) $(PACKAGE_TEST_NEEDS)
	@tests/programs/build nfpm containerd >/dev/null
	@$(MAKE) build-shim build-simgpu build-clients
	GPUFENCE_SOAK=1 $(GOTEST) -count=1 -v -timeout 30m -run TestSystemd ./tests/packages

soak-quadlet: ## the Quadlet unit of docs/podman.md with Debian 13's Podman and systemd
	@$(DEPS) $(BUILD_NEEDS) $(PACKAGE_NEEDS) $(PACKAGE_TEST_NEEDS)
	@tests/programs/build nfpm >/dev/null
	@$(MAKE) build
	GPUFENCE_SOAK=1 $(GOTEST) -count=1 -v -timeout 30m -run TestQuadlet ./tests/packages

.PHONY: man
man: ## write manual pages into dist/man and shell completions into dist/completion
	@$(MAKE) build-go
	@rm -rf $(DIST)/man $(DIST)/completion; mkdir -p $(DIST)/completion
	@$(DIST)/bin/gpufence man $(DIST)/man
	@$(DIST)/bin/gpufenced man $(DIST)/man
	@for shell in bash zsh fish; do $(DIST)/bin/gpufence completion $$shell >$(DIST)/completion/gpufence.$$shell; done

# Beside what everything is built with.
PACKAGE_NEEDS := arm64-cc arm64-libc

.PHONY: package
package: ## deb, rpm, tar, chart, container image, SBOM, checksums and an offline bundle in dist/packages
	@$(DEPS) $(BUILD_NEEDS) $(PACKAGE_NEEDS)
	@nfpm=$$(tests/programs/build nfpm); \
	  go run ./packaging/release/cmd/release --out $(DIST)/packages --work $(DIST)/obj/package --version $(VERSION) --nfpm "$$nfpm/nfpm"

# Of the test that installs packages.
PACKAGE_TEST_NEEDS := package:debootstrap package:rpm arm64-qemu

.PHONY: test-packages
test-packages: ## install, upgrade, roll back and purge the packages in a clean Debian; build them twice and compare
	@$(DEPS) $(BUILD_NEEDS) $(PACKAGE_NEEDS) $(PACKAGE_TEST_NEEDS)
	@tests/programs/build nfpm containerd >/dev/null
	@$(MAKE) build-shim build-simgpu build-clients
	$(GOTEST) -count=1 -v -timeout 20m ./tests/packages

.PHONY: clean
clean: ## remove dist/ and the C parts' objects
	rm -rf $(DIST)
	@for d in shim tests/simgpu tests/clients tests/hardware; do [ ! -f $$d/Makefile ] || $(MAKE) -C $$d clean OUT=$(DIST); done
