//go:build e2e

// Package e2e opens sessions in real VMs: Lima as a library, QEMU, a Debian guest
// built here from packages, real sshd, tmux and iptables.
//
// Everything except building the image runs in a network namespace that the test
// creates. The namespace has a pretend internet (203.0.113.0/24, with a resolver), a
// LAN and services on loopback, so that everything a guest tries to reach ends in
// this process. Only the relay of relay_test.go leads out, to the package registries,
// for TestClients.
package e2e

import (
	"context"
	"flag"
	"os"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

func TestMain(m *testing.M) {
	flag.Parse()
	outside := []realvm.Outside{relayRegistries}
	realvm.Arch = guestArch
	if !testing.Short() && guestArch == vm.HostArch() { // only TestCloudImage uses it
		outside = append(outside, realvm.BuildCloudImage)
	}
	os.Exit(realvm.Main(m, func() error {
		if err := pretendInternet(); err != nil {
			return err
		}
		return realvm.Prepare(context.Background())
	}, outside...))
}
