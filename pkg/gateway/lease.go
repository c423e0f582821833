package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A host of a cluster that loses touch with the others must stop its tasks before they run
// elsewhere. The gateway is the last to enforce that: it compares the host's clock with the end of
// the lease for each frame, so it needs no other process that is alive, and being frozen itself
// makes no difference.

// leaseFile holds the Lease of a gateway of a cluster's task.
const leaseFile = "lease.json"

// Lease is what the network of a VM depends on.
type Lease struct {
	File        string `json:"file"`        // holds the Term, and is replaced each time it is extended
	Incarnation string `json:"incarnation"` // of the host; a term of another one does not count
}

// Term is until when a host may let the guests of its cluster's tasks send.
type Term struct {
	Incarnation string        `json:"incarnation"`
	Boot        string        `json:"boot"`  // id of the boot that Until counts from
	Until       time.Duration `json:"until"` // nanoseconds on bootclock
}

// WriteTerm replaces the term in a file.
func WriteTerm(path string, t Term) error {
	text, err := json.Marshal(t)
	if err == nil {
		err = atomicfile.Write(path, text, 0o600)
	}
	if err != nil {
		return fail.New(fail.Host, "write until when the gateways may send: %w", err)
	}
	return nil
}

const (
	termEvery = 500 * time.Millisecond // between two looks at the file of the term
	maxTerm   = 1 << 10                // bytes of that file, and of leaseFile
)

// deadline is the end of the term, for every frame. The zero deadline limits nothing.
type deadline struct {
	limited atomic.Bool
	until   atomic.Int64 // on bootclock
}

func (d *deadline) passed() bool { return d.limited.Load() && int64(bootclock.Now()) >= d.until.Load() }

// read sets the deadline to the term of a lease. Without a valid one it has passed.
func (d *deadline) read(l Lease) {
	until := time.Duration(0)
	var t Term
	b, err := readFile(l.File, maxTerm)
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	if boot, berr := bootclock.ID(); err == nil && berr == nil && t.Incarnation == l.Incarnation && t.Boot == boot {
		until = t.Until
	}
	d.until.Store(int64(until))
	d.limited.Store(true)
}

// followLease keeps the deadline up to date with the lease in the gateway's directory, until ctx ends.
func (s *server) followLease(ctx context.Context) {
	tick := time.NewTicker(termEvery)
	defer tick.Stop()
	for {
		s.readLease()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// readLease applies the lease, if the gateway has one. A lease is never taken back.
func (s *server) readLease() {
	d := &s.gateway.nic.lease
	var l Lease
	b, err := readFile(filepath.Join(s.dir, leaseFile), maxTerm)
	if errors.Is(err, fs.ErrNotExist) && !d.limited.Load() {
		return
	}
	if err == nil {
		err = json.Unmarshal(b, &l)
	}
	was := d.passed()
	d.read(l) // an unreadable lease has no file
	if is := d.passed(); is && !was {
		s.log.Warn("the host has lost touch with its cluster: nothing that the guest sends gets out", "error", err)
	}
}

// SetLease makes the VM's network depend on a lease, from the next Start or SetPolicy on.
func (p Process) SetLease(l Lease) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "create the gateway's directory: %w", err)
	}
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return p.write(leaseFile, b)
}
