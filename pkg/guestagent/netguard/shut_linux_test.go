//go:build netns

package netguard

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// The seed closes the network with fewer commands than the daemon, and must leave
// the same rules.
func TestSeedShutsAsTheDaemonDoesInNamespaces(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with its namespace
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal("make a network namespace: ", err, "; run as root, as make test does")
	}
	state := func() map[string]rules.State {
		t.Helper()
		found := map[string]rules.State{}
		f := firewall{want: rules.Compile(nil, rules.Network{})}
		if err := f.eachFamily(func(family rules.Family) error {
			now, err := f.save(t.Context(), family.IPv6)
			for _, table := range family.Tables {
				found[key(family.IPv6, table)] = now[table.Name]
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return found
	}
	g := sys.Guest{}
	if err := LockdownFirst(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	seed := state()
	if err := Lockdown(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	daemon := state()
	for _, family := range rules.Compile(nil, rules.Network{}) {
		if family.IPv6 && !kernelIPv6() {
			continue
		}
		for _, table := range family.Tables {
			k := key(family.IPv6, table)
			if !seed[k].InForce(table) || !seed[k].SameChains(daemon[k], table) {
				t.Errorf("table %s, IPv6 %v: rules of the seed = %+v, want them in force and equal to the daemon's, %+v", table.Name, family.IPv6, seed[k], daemon[k])
			}
		}
	}
}
