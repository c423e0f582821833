package netguard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// firewall keeps the kernel's rules in their desired state. It never removes them:
// after a crash of the program, the last rules stay in force.
type firewall struct {
	fake bool

	mu         sync.Mutex
	want       []rules.Family
	loaded     map[string]rules.State // by family and table, as the kernel reported them right after loading
	passed     map[string]int64       // packets refused by rules that have been replaced
	reasserted int64
	err        error
}

// load installs the rules of a policy.
func (f *firewall) load(ctx context.Context, p *policy.Policy, n rules.Network) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want = rules.Compile(p, n)
	f.loaded = map[string]rules.State{}
	f.err = f.eachFamily(func(family rules.Family) error { return f.put(ctx, family) })
	return f.err
}

// check restores rules that another program changed.
func (f *firewall) check(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = f.eachFamily(func(family rules.Family) error {
		now, err := f.save(ctx, family.IPv6)
		if err != nil {
			return err
		}
		stands := true
		for _, t := range family.Tables {
			before, ok := f.loaded[key(family.IPv6, t)]
			stands = stands && ok && now[t.Name].InForce(t) && now[t.Name].SameChains(before, t)
		}
		if stands {
			return nil
		}
		if err := f.put(ctx, family); err != nil {
			return err
		}
		f.reasserted++
		return nil
	})
	return f.err
}

// eachFamily visits the families that the kernel supports. A failure in one does not keep
// the other from being closed.
func (f *firewall) eachFamily(do func(rules.Family) error) error {
	if f.fake {
		return nil
	}
	var errs []error
	for _, family := range f.want {
		if family.IPv6 && !kernelIPv6() {
			continue
		}
		if err := do(family); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// put loads a family's tables with a single command, because each command takes a
// tenth of a second in an emulated guest.
func (f *firewall) put(ctx context.Context, family rules.Family) error {
	six := family.IPv6
	before, err := f.save(ctx, six)
	if err != nil {
		return err
	}
	var texts []string
	for _, t := range family.Tables {
		texts = append(texts, t.Restore(before[t.Name].Jumps(t)))
	}
	if f.restore(ctx, six, strings.Join(texts, "")) != nil {
		// Load the tables one by one: a table that fails must not leave the others
		// open.
		var errs []error
		for _, text := range texts {
			errs = append(errs, f.restore(ctx, six, text))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	after, err := f.save(ctx, six)
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range family.Tables {
		for chain, n := range before[t.Name].Refused(t) {
			if f.passed == nil {
				f.passed = map[string]int64{}
			}
			f.passed[counter(six, chain)] += n
		}
		if !after[t.Name].InForce(t) {
			errs = append(errs, fmt.Errorf("%s table %s differs from what was loaded", command(six, "restore"), t.Name))
			continue
		}
		f.loaded[key(six, t)] = after[t.Name]
	}
	return errors.Join(errs...)
}

func (f *firewall) restore(ctx context.Context, six bool, text string) error {
	_, err := sys.Run(ctx, text, command(six, "restore"), "--wait", "10", "--noflush")
	return err
}

// save returns the kernel's tables by name.
func (f *firewall) save(ctx context.Context, six bool) (map[string]rules.State, error) {
	out, err := sys.Run(ctx, "", command(six, "save"), "--counters")
	return rules.ParseStates(out), err
}

// status returns the current state, with the counters read from the kernel.
func (f *firewall) status(ctx context.Context) (guestproto.Firewall, map[string]int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	dropped := map[string]int64{}
	for chain, n := range f.passed {
		dropped[chain] = n
	}
	err := f.eachFamily(func(family rules.Family) error {
		now, err := f.save(ctx, family.IPv6)
		for _, t := range family.Tables {
			for chain, n := range now[t.Name].Refused(t) {
				dropped[counter(family.IPv6, chain)] += n
			}
		}
		return err
	})
	s := guestproto.Firewall{Loaded: f.want != nil && f.err == nil, Reasserted: f.reasserted}
	if err = errors.Join(f.err, err); err != nil {
		s.Error = sys.OneLine(err)
	}
	return s, dropped
}

func key(six bool, t rules.Table) string { return fmt.Sprint(six, t.Name) }

func counter(six bool, chain string) string {
	if six {
		return chain + "/6"
	}
	return chain
}

func command(six bool, verb string) string {
	if six {
		return "ip6tables-" + verb
	}
	return "iptables-" + verb
}

func kernelIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}
