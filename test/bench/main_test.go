//go:build bench

// Package bench measures sessions and their alternatives in one run. It measures how
// long each way to a session takes, and what its commands and processes cost,
// compared with limactl. It compares the gateway with Lima's stock user-v2 network
// (gvisor-tap-vsock) and QEMU's slirp, without a VM and with one. It compares the
// guest's DNS proxy with dnsmasq, a review with lazygit, and a search of recordings with
// grep.
//
// A slow machine or a missed aim does not fail the run, because only the ratio
// counts; a lost connection of ours or a wrong byte does. The servers are behind a
// cable in their own network namespace, as for every test on real VMs: a gateway
// refuses the host's own addresses.
package bench

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

func TestMain(m *testing.M) {
	if err := choose(os.Getenv("BENCH")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	run := func() int { return realvm.Main(m, newWorld, buildLimactl, buildLazygit, relayRegistry) }
	switch os.Getenv("BENCH") { // on fake VMs, which need no image and send nothing
	case partTasks:
		run = m.Run
	case partReview:
		run = func() int { return runWithLazygit(m) }
	}
	code := run()
	if len(results.tables) > 0 {
		if err := results.publish(docs); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// choose limits the run to one part; "" means all of them, and -run selects more
// precisely.
func choose(part string) error {
	flag.Parse()
	if part == "" || flag.Lookup("test.run").Value.String() != "" {
		return nil
	}
	if parts := []string{partLifecycle, partLarge, partPicker, partTasks, partNetwork, partIntercept, partDNS, partReview}; !slices.Contains(parts, part) {
		return fmt.Errorf("BENCH is %q; it is one of %v, or nothing for all", part, parts)
	}
	return flag.Set("test.run", "(?i)^Test(Report$|"+part+")")
}
