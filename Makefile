# make check   format, lint, unit and script tests; no VM (under 4 minutes on 2 cores)
# make test    all tests, including VMs and the race detector; installs missing tools
# make demo    the main use, from an empty state to the fetched commit of an agent
SHELL := /bin/bash
.DEFAULT_GOAL := build

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app.Version=$(VERSION)
TOOLS   := $(CURDIR)/.tools
GOLANGCI := $(TOOLS)/golangci-lint-v2.15.0
GOFUMPT  := $(TOOLS)/gofumpt-v0.12.0
GORELEASER := $(TOOLS)/goreleaser-v2.15.1
MINISIGN := $(TOOLS)/minisign-v0.3.0
CYCLONEDX := $(TOOLS)/cyclonedx-gomod-v1.10.0
GUEST   := pkg/guestclient/bin/agent-guest-linux-amd64.gz pkg/guestclient/bin/agent-guest-linux-arm64.gz
GUEST_SRC := $(shell find cmd/agent-guest $(addprefix pkg/,atomicfile crash fail guestagent guestproto homearchive ids lazyregexp pipe policy termtext) -name '*.go' ! -name '*_test.go') go.mod

WEB     := pkg/dashboard/web
WEB_SRC := $(shell find $(WEB)/src -type f) $(addprefix $(WEB)/,.npmrc build.mjs package.json package-lock.json tsconfig.json)

export CGO_ENABLED ?= $(if $(filter Darwin,$(shell uname -s)),1,0)
# With the flag that released binaries have, the tests use the same compiled packages.
export GOFLAGS += -trimpath

.PHONY: build size guest web check test unit race script conformance browser vm vm-short e2e e2e-short arm64 pictures escape escape-short fault fault-short chaos sim mutate bench charts demo lint fmt vet-darwin setup clean install completions man notices package-files release-tools release-check package-check reproducible

build: guest web ## bin/agent-sessionizer
	go build -ldflags '$(LDFLAGS)' -o bin/agent-sessionizer ./cmd/agent-sessionizer

# What remains is mostly NATS, SQLite, the guest agents, and our own code. See third_party/*/README.md.
MAX_SIZE ?= 68000000

size: build ## the size of the binary; fails above MAX_SIZE
	@size=$$(wc -c <bin/agent-sessionizer); echo "bin/agent-sessionizer: $$size bytes, at most $(MAX_SIZE)"; [ $$size -le $(MAX_SIZE) ]

guest: $(GUEST)

# -n omits the time stamp in the gzip header, so that the same source gives the same bytes.
pkg/guestclient/bin/agent-guest-linux-%.gz: $(GUEST_SRC)
	CGO_ENABLED=0 GOOS=linux GOARCH=$* go build -buildvcs=false -ldflags '-s -w' -o $(@:.gz=) ./cmd/agent-guest
	gzip -9nf $(@:.gz=)

web: pkg/dashboard/dist/index.html ## the pages of the dashboard, which the binary embeds

# No install script of a package runs. The build fails if the pages are too large.
pkg/dashboard/dist/index.html: $(WEB_SRC)
	@command -v npm >/dev/null || { echo "npm is missing; run: make setup"; exit 1; }
	cd $(WEB) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && npm run --silent check && npm run --silent build

# The shells and man look for these files below each prefix whose bin is in PATH.
install: PREFIX := $(or $(PREFIX),$(HOME)/.local)
install: build man ## binary, manual pages and completions; PREFIX=/usr/local for all users
	install -d $(PREFIX)/bin $(PREFIX)/share/man/man1 $(PREFIX)/share/bash-completion/completions $(PREFIX)/share/zsh/site-functions $(PREFIX)/share/fish/vendor_completions.d
	install -m 755 bin/agent-sessionizer $(PREFIX)/bin/agent-sessionizer
	install -m 644 man/*.1 $(PREFIX)/share/man/man1/
	install -m 644 completions/agent-sessionizer.bash $(PREFIX)/share/bash-completion/completions/agent-sessionizer
	install -m 644 completions/agent-sessionizer.zsh $(PREFIX)/share/zsh/site-functions/_agent-sessionizer
	install -m 644 completions/agent-sessionizer.fish $(PREFIX)/share/fish/vendor_completions.d/agent-sessionizer.fish

setup: ## system packages for the tests and the demo; uses sudo only if one is missing
	scripts/setup.sh

check: guest web fmt lint vet-darwin size unit script

fmt: $(GOFUMPT)
	@out=$$($(GOFUMPT) -l $$(git ls-files -co --exclude-standard '*.go' ':!third_party')); [ -z "$$out" ] || { echo "not gofumpt-ed (run: gofumpt -w FILE):"; echo "$$out"; exit 1; }

lint: $(GOLANGCI)
	$(GOLANGCI) run --build-tags fakevm ./...
	go vet -tags bench,chaos,e2e,escape,fault,foreign,sim,vmtest,netns,browser,conformance ./test/...

# Lima's host agent needs cgo on darwin; everything else must build without cgo.
vet-darwin:
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 go vet ./...

UNIT = $$(go list ./... | grep -v /test/) ./test/mutate ./test/picture ./test/realvm/... ./test/testenv

unit: guest web
	go test $(UNIT)

# The race detector slows the check of all texts, the SDK's WebAssembly and the search for secrets down by
# ten times or more, and none of them has goroutines of ours.
NO_RACE := . ./pkg/diagnose ./pkg/secret/onepassword
# SQLite, which is translated from C, would be four times as slow; only its own code is left out.
RACE_FLAGS := -race -gcflags='modernc.org/...=-race=false'

# Many of these tests wait for the disk, or for each other's processes: memory is faster, where there is enough, and
# more tests may run at once than there are processors.
FAST_TMP := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 10000000 {print "/dev/shm"}')

race: guest web ## the unit tests with the race detector, which needs a C compiler
	go test $(NO_RACE)
	CGO_ENABLED=1 $(if $(FAST_TMP),TMPDIR=$(FAST_TMP)) go test $(RACE_FLAGS) -p 3 -parallel 4 -timeout 20m $$(go list $(UNIT) | grep -vxF "$$(go list $(NO_RACE))")

script: guest web
	go test -count=1 -parallel 4 ./test/script/... # go does not track the tested binary, hence -count=1; most tests mostly wait

conformance: guest web ## the protocol's own suite on the tools of serve, from npm
	go test -tags conformance -count=1 -run '^TestMCPConformance$$' ./pkg/server

browser: guest web ## the dashboard in Chromium, with fake VMs
	go test -tags browser -count=1 -timeout 10m ./test/browser/...

# Sequential, because two VMs at once are too much for two cores.
vm: guest ## the driver's suite and the built image, on real VMs
	go test -tags vmtest -count=1 -p 1 -timeout 30m -v -run '^(TestSuite|TestPanic|TestLayers|TestCheckpointInterrupted|TestDebianImage.*)$$' ./pkg/vm/lima ./pkg/image

vm-short: guest ## what the end-to-end tests do not show of the driver: a guest that panics, and one that powers off while it boots
	go test -tags vmtest -count=1 -timeout 30m -v -run '^(TestSuite|TestPanic|TestLayers)$$/^(nothing_there|names|files_only|a_guest_.*)$$' ./pkg/vm/lima

e2e e2e-short: guest web ## sessions, tasks and agents in real VMs; e2e-short repeats less
	go test -tags netns -count=1 -run 'InNamespaces$$' ./pkg/guestagent/netguard ./pkg/hostnet ./pkg/cluster
	go test -tags e2e -count=1 -timeout 120m -v -short=$(if $(filter e2e-short,$@),true,false) ./test/e2e/...

arm64: guest web ## a session on Linux arm64, emulated, from a Debian image for it that is built here; half an hour or more, and not part of make test
	scripts/setup.sh foreign
	go test -tags e2e,foreign -count=1 -timeout 240m -v -run '^TestForeignArchitecture$$' ./test/e2e

pictures: guest web ## new pictures for the README and docs: from real sessions, and the picker's with made-up ones
	PICTURES=$(CURDIR)/docs go test -tags e2e -count=1 -timeout 60m -run '^(TestPicker|TestAttention|TestReview)$$' ./test/e2e
	PICTURES=$(CURDIR)/docs go test -count=1 -run '^TestPickerShowsWhoNeedsYou$$' ./test/script
	PICTURES=$(CURDIR)/docs go test -tags browser -count=1 -run '^TestViews$$' ./test/browser

# Runs as its own binary, not with go test: its last line is the result.
escape escape-short: guest ## root in a guest tries to escape; escape first checks that each technique works without the gateway
	go test -c -tags escape -o bin/escape.test ./test/escape
	cd test/escape && ../../bin/escape.test -test.v -test.timeout 150m -test.short=$(if $(filter escape-short,$@),true,false)

# Like the escapes: its last line is the result.
chaos: guest ## 2,000 tasks on a cluster of five hosts, with killed and frozen processes, cut and slow links, wrong clocks, full disks and upgrades; on fake VMs
	go test -c -tags chaos -o bin/chaos.test ./test/chaos
	cd test/chaos && ../../bin/chaos.test -test.v -test.timeout 4h

# SIM_HOSTS="10 30 100:100000 1000:600@2" is the whole of it, on a quiet machine; SIM_CORES=3.
sim: ## what tasks cost a cluster as its fleet grows, with simulated hosts; SIM_DOCS=docs writes it to docs/benchmarks.md
	go test -c -tags sim -o bin/sim.test ./test/sim
	cd test/sim && SIM_HOSTS="$(SIM_HOSTS)" SIM_TASKS="$(SIM_TASKS)" SIM_CORES="$(SIM_CORES)" SIM_DOCS="$(abspath $(SIM_DOCS))" ../../bin/sim.test -test.v -test.timeout 12h

fault fault-short: guest ## tasks that are killed, stopped or cut off at every point, and failing hosts and guests; on fake VMs
	go test -c -tags fault -o bin/fault.test ./test/fault
	cd test/fault && ../../bin/fault.test -test.v -test.timeout 120m -test.short=$(if $(filter fault-short,$@),true,false)

# Not part of any other target: N mutants of each package take minutes to an hour.
PKG ?= policy gateway repo store task session secret server homearchive config ssh attach
N ?= 40
mutate: guest ## mutants that the unit tests of PKG do not detect; N=40 mutants of each (0: all), SEED=1, JOBS=2
	go run ./test/mutate -n $(N) -seed $(or $(SEED),1) -j $(or $(JOBS),2) $(addprefix pkg/,$(PKG))

# The ratios matter; a missed target is not a failure. BENCH=lifecycle, large, picker, tasks,
# network, intercept, dns or review runs one part. Results of fewer than five BENCH_RUNS are not written.
bench: setup guest ## sessions, their network and reviews compared with alternatives, into docs/benchmarks.* (up to an hour on 2 cores)
	PATH=$$PATH:/usr/sbin command -v dnsmasq >/dev/null || $(if $(filter 0,$(shell id -u)),,sudo) apt-get install -y -qq --no-install-recommends dnsmasq-base
	cd test/bench && PATH=$$PATH:/usr/sbin go test -tags bench -count=1 -timeout 4h -v .

charts: ## docs/benchmarks.svg from docs/benchmarks.json, without measuring
	go test -count=1 -run '^TestChartIsCurrent$$' ./test/picture -update

# The unit tests run once, with the race detector; a second run would test the same.
TEST_PARTS := guest web fmt lint vet-darwin size release-check race script conformance browser vm-short e2e-short escape-short fault-short

test: setup
	@times=; for part in $(TEST_PARTS); do \
		start=$$SECONDS; $(MAKE) $$part || exit; times+="$$((SECONDS - start)) s $$part"$$'\n'; \
	done; printf 'all tests passed; what took longest:\n%s' "$$(sort -rn <<<"$${times%?}" | head -8)"; echo

demo: setup build
	scripts/demo.sh

completions: build
	mkdir -p completions
	for s in bash zsh fish; do bin/agent-sessionizer completion $$s >completions/agent-sessionizer.$$s; done

man: build ## man/*.1, generated from the commands' help and not kept in the repository
	rm -rf man
	bin/agent-sessionizer man man

# The packages' manual pages are compressed, and their unit starts the program where they install it.
package-files: man
	rm -rf bin/package
	mkdir -p bin/package/man
	cp man/*.1 bin/package/man/
	gzip -9n bin/package/man/*.1
	sed -e '/^# agent-sessionizer serve unit/d' -e 's|COMMAND|/usr/bin/agent-sessionizer serve|' pkg/server/unit/agent-sessionizer.service.tmpl >bin/package/agent-sessionizer.service

release-tools: $(GORELEASER) $(MINISIGN) $(CYCLONEDX)

release-check: release-tools ## what a release would publish for Linux, into dist/, signed with a key made for it
	$(GORELEASER) check
	scripts/release-check.sh

package-check: ## installs and purges the built deb in a clean root file system; after release-check, as root; ARCH=arm64 for the other architecture
	scripts/package-check.sh

reproducible: ## builds the current commit twice, in two directories, and compares the programs
	scripts/reproducible.sh

notices: ## the licences of all modules and npm packages in the binary, which it embeds
	npm ci --prefix $(WEB) --ignore-scripts --no-audit --no-fund --loglevel=error
	go test -count=1 -run '^TestNoticesAreCurrent$$' ./pkg/release -update

$(GOLANGCI):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
	mv $(TOOLS)/golangci-lint $@

$(GOFUMPT):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS) go install mvdan.cc/gofumpt@v0.12.0
	mv $(TOOLS)/gofumpt $@

$(GORELEASER):
	mkdir -p $(TOOLS)
	CGO_ENABLED=0 GOBIN=$(TOOLS) go install github.com/goreleaser/goreleaser/v2@v2.15.1
	mv $(TOOLS)/goreleaser $@

$(MINISIGN):
	mkdir -p $(TOOLS)
	CGO_ENABLED=0 GOBIN=$(TOOLS) go install aead.dev/minisign/cmd/minisign@v0.3.0
	mv $(TOOLS)/minisign $@

$(CYCLONEDX):
	mkdir -p $(TOOLS)
	CGO_ENABLED=0 GOBIN=$(TOOLS) go install github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
	mv $(TOOLS)/cyclonedx-gomod $@

clean:
	rm -rf bin man $(GUEST) $(WEB)/node_modules
	find pkg/dashboard/dist -type f ! -name .gitignore -delete
