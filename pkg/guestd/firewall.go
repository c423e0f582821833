package guestd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestd/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

const (
	commandTime  = 20 * time.Second // of one iptables command; emulated guests are slow
	commandBytes = 4 << 20
)

// firewall keeps the rules in the kernel as they should be. It never removes
// them: a program that dies leaves the door as it was.
type firewall struct {
	fake bool

	mu         sync.Mutex
	want       []rules.Family
	loaded     map[string]rules.State // by family and table, as the kernel said right after loading
	passed     map[string]int64       // packets refused by rules that were replaced since
	reasserted int64
	err        error
}

// load puts the rules of a policy in place.
func (f *firewall) load(ctx context.Context, p *policy.Policy, n rules.Network) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want = rules.Compile(p, n)
	f.loaded = map[string]rules.State{}
	f.err = f.each(func(six bool, t rules.Table) error { return f.put(ctx, six, t) })
	return f.err
}

// check puts back what another program changed.
func (f *firewall) check(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = f.each(func(six bool, t rules.Table) error {
		now, err := f.save(ctx, six, t)
		if err != nil {
			return err
		}
		before, ok := f.loaded[key(six, t)]
		if ok && now.Stands(t) && now.SameChains(before, t) {
			return nil
		}
		if err := f.put(ctx, six, t); err != nil {
			return err
		}
		f.reasserted++
		return nil
	})
	return f.err
}

// each visits the tables. A failing one does not keep the others from closing.
func (f *firewall) each(do func(six bool, t rules.Table) error) error {
	if f.fake {
		return nil
	}
	var errs []error
	for _, family := range f.want {
		if family.IPv6 && !kernelIPv6() {
			continue
		}
		for _, t := range family.Tables {
			if err := do(family.IPv6, t); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func (f *firewall) put(ctx context.Context, six bool, t rules.Table) error {
	before, err := f.save(ctx, six, t)
	if err != nil {
		return err
	}
	if _, err := run(ctx, t.Restore(before.Jumps(t)), command(six, "restore"), "--wait", "10", "--noflush"); err != nil {
		return err
	}
	for chain, n := range before.Refused(t) {
		if f.passed == nil {
			f.passed = map[string]int64{}
		}
		f.passed[counter(six, chain)] += n
	}
	after, err := f.save(ctx, six, t)
	if err != nil {
		return err
	}
	if !after.Stands(t) {
		return fmt.Errorf("%s table %s is not as it was loaded", command(six, "restore"), t.Name)
	}
	f.loaded[key(six, t)] = after
	return nil
}

func (f *firewall) save(ctx context.Context, six bool, t rules.Table) (rules.State, error) {
	out, err := run(ctx, "", command(six, "save"), "--counters", "--table", t.Name)
	return rules.ParseState(out), err
}

// status is what is known; the counters are read from the kernel.
func (f *firewall) status(ctx context.Context) (wire.Firewall, map[string]int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	dropped := map[string]int64{}
	for chain, n := range f.passed {
		dropped[chain] = n
	}
	err := f.each(func(six bool, t rules.Table) error {
		now, err := f.save(ctx, six, t)
		for chain, n := range now.Refused(t) {
			dropped[counter(six, chain)] += n
		}
		return err
	})
	s := wire.Firewall{Loaded: f.want != nil && f.err == nil, Reasserted: f.reasserted}
	if err = errors.Join(f.err, err); err != nil {
		s.Error = oneLine(err)
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

// run executes a system program with bounded time and output.
func run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL=C"}
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs capped
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(errs.String()), "\n")
		return "", fmt.Errorf("%s: %w: %s", name, err, wire.Clean(first))
	}
	return out.String(), nil
}

// capped keeps the beginning of what is written to it.
type capped struct{ bytes.Buffer }

func (c *capped) Write(p []byte) (int, error) {
	if room := commandBytes - c.Len(); room > 0 {
		c.Buffer.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}
