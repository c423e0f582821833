package netguard

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Lockdown closes everything except loopback, DHCP and SSH, with or without a policy.
func Lockdown(ctx context.Context, g sys.Guest) error {
	if err := g.NeedRoot("lockdown"); err != nil {
		return err
	}
	fw := firewall{fake: g.Fake}
	return fw.load(ctx, nil, rules.Network{})
}

// LockdownFirst installs the lockdown on a machine that has no rules yet. It uses one
// command per family, because each costs a tenth of a second under emulation.
func LockdownFirst(ctx context.Context, g sys.Guest) error {
	builtin := map[string]int{"INPUT": 0, "OUTPUT": 0, "FORWARD": 0, "PREROUTING": 0}
	for _, f := range rules.Compile(nil, rules.Network{}) {
		if f.IPv6 && !kernelIPv6() {
			continue
		}
		var text string
		for _, t := range f.Tables {
			text += t.Restore(builtin)
		}
		if err := sys.Perform(ctx, text, command(f.IPv6, "restore"), "--wait", "10", "--noflush"); err != nil {
			return err
		}
	}
	return nil
}
