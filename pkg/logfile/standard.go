package logfile

import (
	"context"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// lookEvery is how often the file's size is checked when other parts of the program
// write to it, such as the runtime or libraries.
const lookEvery = 10 * time.Second

// Standard limits the standard error of a process whose starter has redirected it to a
// log, which otherwise would grow for as long as the process lives. When the file is
// full, it is renamed, and a new one replaces it as standard error and output, so that
// the new file also receives the last output of a crash.
type Standard struct {
	path string
	Limits
	log bool // standard error was that file at the start, and we have limited it since

	mu sync.Mutex
}

// NewStandard returns the standard error as the log at path. If standard error is
// another file or a terminal, Standard only writes to it.
func NewStandard(path string, l Limits) *Standard {
	s := &Standard{path: path, Limits: l}
	own, err1 := os.Stderr.Stat()
	is, err2 := os.Stat(path)
	s.log = err1 == nil && err2 == nil && is.Mode().IsRegular() && os.SameFile(own, is)
	return s
}

// Write appends to the log.
func (s *Standard) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bound(len(p))
	return os.Stderr.Write(p)
}

// Watch limits what other code writes, until ctx ends.
func (s *Standard) Watch(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		s.bound(0)
		s.mu.Unlock()
	}
}

// bound begins a new file if that is due. It ignores errors, because the next record
// tries again.
func (s *Standard) bound(n int) {
	own, err := os.Stderr.Stat()
	if !s.log || err != nil || !s.due(own, n, time.Now()) {
		return
	}
	// The lock belongs to the open file, which our child processes share. They do not
	// execute this code.
	if unix.Flock(int(os.Stderr.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	defer unix.Flock(int(os.Stderr.Fd()), unix.LOCK_UN) //nolint:errcheck // the lock of the new standard error
	is, err := os.Stat(s.path)
	// If the file does not exist, its directory was removed, and with it the subject of
	// the log. If it is another file, a process that shares the log has begun it.
	if err != nil || os.SameFile(own, is) && turn(s.path, s.Limits) != nil {
		return
	}
	f, err := os.OpenFile(s.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	for _, std := range []*os.File{os.Stdout, os.Stderr} {
		if was, err := std.Stat(); err == nil && os.SameFile(was, own) {
			_ = replace(f, std) // both files are open, so this does not fail
		}
	}
}
