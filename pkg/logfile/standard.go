package logfile

import (
	"context"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// lookEvery is how often the file is measured when other parts of the program
// write to it: the runtime, libraries.
const lookEvery = 10 * time.Second

// Standard is the standard error of a process whose starter has made a log of it,
// which may grow for as long as the process lives. When the file is full it is
// renamed, and a new one takes its place as standard error and output, so that
// the last words of a crash are in it, too.
type Standard struct {
	path string
	Limits
	log bool // the standard error was that file at the start, and is a log of ours since

	mu sync.Mutex
}

// NewStandard is the standard error as the log at path. If it is another file, or
// a terminal, Standard only writes to it.
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

// Watch bounds what others write, until ctx ends.
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

// bound begins a new file if that is due. Whatever keeps it from that is passed
// over: it is tried again with the next record.
func (s *Standard) bound(n int) {
	own, err := os.Stderr.Stat()
	if !s.log || err != nil || !s.due(own, n, time.Now()) {
		return
	}
	// The lock is on the open file, which children share that we have started. They
	// do not get here.
	if unix.Flock(int(os.Stderr.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	defer unix.Flock(int(os.Stderr.Fd()), unix.LOCK_UN) //nolint:errcheck // of what is the standard error then
	is, err := os.Stat(s.path)
	// Without the file its directory was removed, which ends what the log is of. If
	// it is another file, a process that shares the log has begun it.
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
			_ = replace(f, std) // of two open files, which does not fail
		}
	}
}
