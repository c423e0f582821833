package store_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"

	sqlite "modernc.org/sqlite"
)

// TestMain lets this test binary act as a second process that uses the store. The
// environment says what it does, and its argument is a path.
func TestMain(m *testing.M) {
	what := os.Getenv("STORE_TEST_CHILD")
	if what == "" {
		hookCommits()
		os.Exit(testenv.Run(m))
	}
	ctx := context.Background()
	var verb string
	var count, last int // the repeat count, and the step before which to die
	_, _ = fmt.Sscan(what, &verb, &count, &last)
	dieBefore(last)
	if err := child(ctx, verb, os.Getenv("STORE_TEST_PATH"), count); err != nil {
		fmt.Println("error", int(fail.CodeOf(err)), strconv.Quote(fail.HintOf(err)), err)
		os.Exit(1)
	}
	os.Exit(0)
}

// dieBefore makes this process kill itself before its nth step, counted from 1. A
// step is a row that a statement changes, or a commit.
func dieBefore(nth int) {
	if nth == 0 {
		return
	}
	var steps atomic.Int64
	step := func() {
		if steps.Add(1) == int64(nth) {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // do nothing more
		}
	}
	sqlite.RegisterConnectionHook(func(c sqlite.ExecQuerierContext, _ string) error {
		hooks := c.(sqlite.HookRegisterer)
		hooks.RegisterPreUpdateHook(func(sqlite.SQLitePreUpdateData) { step() })
		hooks.RegisterCommitHook(func() int32 { step(); return 0 })
		return nil
	})
}

func child(ctx context.Context, verb, path string, count int) error {
	switch verb {
	case "unprivileged":
		if os.Geteuid() == 0 {
			if err := syscall.Setuid(65534); err != nil {
				return err
			}
		}
	case "small-files", "small-files-of-tasks": // simulates a disk that is full after this many bytes of a file
		lim := syscall.Rlimit{Cur: uint64(count), Max: uint64(count)}
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &lim); err != nil {
			return err
		}
		count = 1 << 20
	}
	// Wait for the signal, so that all children start at once.
	fmt.Println("up")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	s, err := store.Open(ctx, path)
	if err != nil {
		return err
	}
	defer s.Close()
	switch verb {
	case "open", "unprivileged":
		_, err := s.Sessions(ctx, true)
		return err
	case "create":
		_, created, err := s.Create(ctx, row(fmt.Sprintf("%012d", os.Getpid())), event("made", 0), admitAll)
		fmt.Println("created", created)
		return err
	case "count", "small-files":
		for range count {
			n, err := increment(ctx, s, "one")
			if err != nil {
				return err
			}
			fmt.Println("n", n)
		}
	case "small-files-of-tasks":
		for i := range count {
			if err := fill(ctx, s, i); err != nil {
				return err
			}
			fmt.Println("n", i)
		}
	case "timed":
		return timed(ctx, s, count)
	case "life":
		return life(ctx, s)
	case "admit":
		return admitAndRun(ctx, s)
	case "ingest":
		return ingest(ctx, s, count)
	case "prune":
		_, _, err := s.PruneEvents(ctx, time.Now().Add(time.Hour), func(string) bool { return false }, false)
		return err
	}
	return nil
}

// increment runs a read-update-append transaction: the counter in the status and the
// event that reports it change together or not at all.
func increment(ctx context.Context, s *store.Store, id string) (int, error) {
	var n int
	_, err := s.Update(ctx, id, func(r *store.Session) (store.Event, error) {
		n = counter(*r) + 1
		r.Status = fmt.Appendf(nil, `{"n":%d}`, n)
		return event("count", n), nil
	})
	return n, err
}

func counter(r store.Session) int {
	var f struct{ N int }
	if err := json.Unmarshal(r.Status, &f); err != nil {
		panic(err)
	}
	return f.N
}

// event returns an event with a number as its data.
func event(kind string, n int) store.Event {
	return store.Event{Kind: kind, Data: fmt.Appendf(nil, `{"n":%d}`, n)}
}

// row returns a session; all sessions have the same repository.
func row(id string) store.Session {
	return store.Session{ID: id, Name: "agent-o-r-" + id, RepoKey: "github.com/o/r", Repo: "o/r", Phase: "creating", Desired: "ready", Spec: json.RawMessage(`{"a":1}`)}
}

func admitAll([]store.Session) error { return nil }

// process is a child process; it is gone when the test ends.
type process struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func spawn(t testing.TB, what, path string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(exe)}
	p.Env = append(os.Environ(), "STORE_TEST_CHILD="+what, "STORE_TEST_PATH="+path)
	p.Stderr = os.Stderr
	if p.in, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Process.Kill()
		_ = p.Wait()
	})
	p.expect(t, "up")
	return p
}

func (p *process) expect(t testing.TB, line string) {
	t.Helper()
	if !p.out.Scan() || p.out.Text() != line {
		t.Fatalf("line of the child = %q, want %q", p.out.Text(), line)
	}
}

func (p *process) shoot(t testing.TB) {
	t.Helper()
	if _, err := io.WriteString(p.in, "go\n"); err != nil {
		t.Fatal(err)
	}
}

// finish returns what the child printed until it ended.
func (p *process) finish() (lines []string, err error) {
	for p.out.Scan() {
		lines = append(lines, p.out.Text())
	}
	return lines, p.Wait()
}

func newStore(t testing.TB) (*store.Store, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state", "store.db")
	return reopen(t, path), path
}

func reopen(t testing.TB, path string) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// withSession returns a store with the session "one".
func withSession(t testing.TB) (*store.Store, string) {
	t.Helper()
	s, path := newStore(t)
	if _, created, err := s.Create(t.Context(), row("one"), event("made", 0), admitAll); err != nil || !created {
		t.Fatalf("Create(one) = %t, %v, want true, nil", created, err)
	}
	return s, path
}

// finishTx fails unless the events have no gap and agree with the row.
func finishTx(t *testing.T, s *store.Store) int {
	t.Helper()
	r, err := s.Session(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	evs, err := s.Events(t.Context(), "one", 0, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for i, ev := range evs {
		if ev.Seq != int64(i+1) || string(ev.Data) != fmt.Sprintf(`{"n":%d}`, i) {
			t.Fatalf("event %d = seq %d, data %s, want seq %d, data {\"n\":%d}", i, ev.Seq, ev.Data, i+1, i)
		}
	}
	if n := counter(r); n != len(evs)-1 {
		t.Fatalf("counter of the row = %d, want %d, the number of events", n, len(evs)-1)
	}
	return len(evs) - 1
}

// hostError fails unless err has the code Host and a hint.
func hostError(t *testing.T, err error) {
	t.Helper()
	var e *fail.Error
	if !errors.As(err, &e) || fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
		t.Fatalf("error = %v (code %v, hint %q), want code %v with a hint", err, fail.CodeOf(err), fail.HintOf(err), fail.Host)
	}
}
