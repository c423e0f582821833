package gateway

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
)

func TestLease(t *testing.T) {
	boot, err := bootclock.ID()
	if err != nil {
		t.Fatal(err)
	}
	now := bootclock.Now()
	for name, c := range map[string]struct {
		term   Term
		passed bool
	}{
		"a term":                    {Term{"one", boot, now + time.Hour}, false},
		"a term that has ended":     {Term{"one", boot, now}, true},
		"of another incarnation":    {Term{"two", boot, now + time.Hour}, true},
		"of another boot":           {Term{"one", "other", now + time.Hour}, true},
		"a term without anything":   {Term{}, true},
		"a term that ends in a day": {Term{"one", boot, now + 24*time.Hour}, false},
	} {
		file := filepath.Join(t.TempDir(), "term.json")
		if err := WriteTerm(file, c.term); err != nil {
			t.Fatal(err)
		}
		var d deadline
		if d.passed() {
			t.Errorf("%s: passed without a lease = true, want false", name)
		}
		d.read(Lease{File: file, Incarnation: "one"})
		if got := d.passed(); got != c.passed {
			t.Errorf("%s: passed = %t, want %t", name, got, c.passed)
		}
		if err := os.WriteFile(file, []byte(`{"incarnation": "one", "until":`), 0o600); err != nil {
			t.Fatal(err)
		}
		if d.read(Lease{File: file, Incarnation: "one"}); !d.passed() {
			t.Errorf("%s: passed with a damaged file = false, want true", name)
		}
		os.Remove(file)
		if d.read(Lease{File: file, Incarnation: "one"}); !d.passed() {
			t.Errorf("%s: passed without the file = false, want true", name)
		}
	}
}

// TestLeaseEndsWithoutAnotherLook checks that a gateway whose file is not read any more, such as one that
// was frozen, lets nothing out after the term that it knows.
func TestLeaseEndsWithoutAnotherLook(t *testing.T) {
	g := quietGateway(t, nil)
	frame := frames()["SYN"]
	if frame.why != accepted || frame.frame == nil {
		t.Fatal("frames() lacks an accepted SYN")
	}
	g.nic.lease.limited.Store(true)
	g.nic.lease.until.Store(int64(bootclock.Now() + time.Hour))
	g.nic.input(frame.frame)
	if n := g.Stats().Dropped["lease"]; n != 0 {
		t.Errorf("frames dropped during the term = %d, want 0", n)
	}
	g.nic.lease.until.Store(int64(bootclock.Now()))
	g.nic.input(frame.frame)
	if n := g.Stats().Dropped["lease"]; n != 1 {
		t.Errorf("frames dropped after the term = %d, want 1", n)
	}
}

// TestLeaseIsRead checks that a gateway reads the lease in its directory, and that it cannot be taken back.
func TestLeaseIsRead(t *testing.T) {
	dir := t.TempDir()
	s := &server{dir: dir, log: slog.New(slog.DiscardHandler), gateway: quietGateway(t, nil)}
	s.readLease()
	if s.gateway.nic.lease.passed() {
		t.Error("passed without a lease = true, want false")
	}
	boot, err := bootclock.ID()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "term.json")
	if err := (Process{Dir: dir}).SetLease(Lease{File: file, Incarnation: "one"}); err != nil {
		t.Fatal(err)
	}
	if s.readLease(); !s.gateway.nic.lease.passed() {
		t.Error("passed without a term = false, want true")
	}
	if err := WriteTerm(file, Term{"one", boot, bootclock.Now() + time.Hour}); err != nil {
		t.Fatal(err)
	}
	if s.readLease(); s.gateway.nic.lease.passed() {
		t.Error("passed during the term = true, want false")
	}
	os.Remove(filepath.Join(dir, leaseFile))
	if s.readLease(); !s.gateway.nic.lease.passed() {
		t.Error("passed after the lease was removed = false, want true")
	}
}
