package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// idleLog returns a decision log without a writer; the test takes the writer's part.
func idleLog(t *testing.T) *decisionLog {
	t.Helper()
	j := &decisionLog{path: filepath.Join(t.TempDir(), decisionLogFile), queue: make(chan Record, decisionQueue), pending: map[Record]*pending{}}
	if err := j.open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.file.Close() })
	return j
}

func (j *decisionLog) entries(t *testing.T) []Entry {
	t.Helper()
	var all []Entry
	for e, err := range Decisions(context.Background(), filepath.Dir(j.path), false) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// times counts the decisions that entries stand for.
func times(entries []Entry) (n int64) {
	for _, e := range entries {
		n += e.Times()
	}
	return n
}

func denial(i int) Record {
	return Record{Kind: KindDNS, Name: fmt.Sprintf("n%d.example.org", i), Reason: "not on the allowlist"}
}

// TestDecisionLogWindow checks that a guest gets a limited number of lines and a limited
// amount of memory in a window, and that the excess is counted.
func TestDecisionLogWindow(t *testing.T) {
	for name, record := range map[string]func(int) Record{
		"denials": denial,
		"connections": func(i int) Record {
			return Record{Kind: KindTCP, Name: "example.org", Allowed: true, Conn: uint64(i)}
		},
	} {
		j := idleLog(t)
		const made = 3 * maxCounted
		for i := range made {
			j.aggregate(record(i))
		}
		if got := len(j.entries(t)); got != maxPerWindow {
			t.Errorf("%s: %d lines in a window, want %d", name, got, maxPerWindow)
		}
		if len(j.pending) > maxCounted {
			t.Errorf("%s: %d decisions are being counted, want at most %d", name, len(j.pending), maxCounted)
		}
		j.flush()
		if got := j.entries(t); len(got) != maxPerWindow+1 || times(got) != made {
			t.Errorf("%s: %d lines for %d decisions, want %d for %d", name, len(got), times(got), maxPerWindow+1, made)
		}
	}
}

// TestDecisionLogCountsEqualDenials checks that an equal denial becomes one line, then a
// count, and in the next window a line again.
func TestDecisionLogCountsEqualDenials(t *testing.T) {
	j := idleLog(t)
	for range 3 {
		for i := range 5 {
			r := denial(0)
			r.Time, r.Conn, r.Elapsed, r.BytesIn, r.BytesOut = time.Unix(int64(i), 0), uint64(i), time.Duration(i), int64(i), int64(i)
			j.aggregate(r)
		}
		j.flush()
	}
	got := j.entries(t)
	if len(got) != 6 || times(got) != 15 || got[1].Count != 4 || got[1].Time.Unix() != 4 || len(j.pending) != 0 {
		t.Errorf("got %d lines for %d decisions, %d pending, want 6 lines for 15, 0 pending, and the second with Count 4 at 4 s: %+v", len(got), times(got), len(j.pending), got)
	}
}

// TestDecisionLogQueue checks that the queue is bounded and that records that find it full
// are counted.
func TestDecisionLogQueue(t *testing.T) {
	j := idleLog(t)
	for i := range decisionQueue + 7 {
		j.add(denial(i))
	}
	j.flush()
	if got := j.entries(t); len(got) != 1 || got[0].Count != 7 {
		t.Errorf("entries of a full queue = %+v, want one with Count 7", got)
	}
}

// TestDecisionLogRotates checks that the log uses two files of at most maxDecisionLog bytes,
// also across restarts.
func TestDecisionLogRotates(t *testing.T) {
	j := idleLog(t)
	e := Entry{Record: Record{Kind: KindTCP, Source: strings.Repeat("x", 8000)}}
	for i := range 3 * maxDecisionLog / 8000 {
		e.Seq++
		if err := j.append(e); err != nil {
			t.Fatal(err)
		}
		if i%100 == 0 { // as another process that continues the log
			if err := errors.Join(j.file.Close(), j.open()); err != nil {
				t.Fatal(err)
			}
		}
	}
	files, err := os.ReadDir(filepath.Dir(j.path))
	if err != nil || len(files) != 2 {
		t.Fatalf("ReadDir = %v, %v, want 2 files", files, err)
	}
	for _, f := range files {
		i, err := f.Info()
		if err != nil {
			t.Error(err)
		} else if i.Size() > maxDecisionLog || i.Mode() != 0o600 {
			t.Errorf("%s has %d bytes, mode %v, want at most %d, %v", f.Name(), i.Size(), i.Mode(), maxDecisionLog, fs.FileMode(0o600))
		}
	}
	all := j.entries(t)
	if last := all[len(all)-1]; last.Seq != e.Seq {
		t.Errorf("Seq of the last entry = %d, want %d", last.Seq, e.Seq)
	}
	for i := range all[1:] {
		if all[i+1].Seq != all[i].Seq+1 {
			t.Fatalf("entry %d follows entry %d, want %d", all[i+1].Seq, all[i].Seq, all[i].Seq+1)
		}
	}
}

// TestDecisionLogOnAFullDisk checks that the log reports and counts while it cannot
// write. Afterwards it continues without a gap in the numbers and writes the count.
func TestDecisionLogOnAFullDisk(t *testing.T) {
	j := idleLog(t)
	j.line(Entry{Record: denial(0)})
	good := j.file
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { full.Close() })
	j.file = full
	for i := range 4 {
		j.aggregate(denial(1 + i))
	}
	j.flush()
	if err := j.err(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("err() on a full disk = %v, want %v", err, syscall.ENOSPC)
	}
	// The kernel wrote only the beginning of a line.
	if _, err := good.WriteString(`{"seq":2,"na`); err != nil {
		t.Fatal(err)
	}
	j.file = good
	j.aggregate(denial(9))
	j.flush()
	got := j.entries(t)
	if err := j.err(); err != nil {
		t.Errorf("err() after the disk has space again = %v, want nil", err)
	}
	if len(got) != 3 || got[1].Name != denial(9).Name || got[2].Seq != 3 || got[2].Kind != KindLog || got[2].Count != 4 {
		t.Errorf("entries = %+v, want 3, the second for %s, the last with Seq 3, Kind %q, Count 4", got, denial(9).Name, KindLog)
	}
}

// TestDecisionLogCannotRotate checks that opening a new file is retried after a failure.
func TestDecisionLogCannotRotate(t *testing.T) {
	j := idleLog(t)
	j.line(Entry{Record: denial(0)})
	// The new path's directory is missing, so the new file cannot be opened.
	j.size = maxDecisionLog
	dir := j.path
	j.path = filepath.Join(filepath.Dir(j.path), "missing", decisionLogFile)
	j.line(Entry{Record: denial(1)})
	if err := j.err(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("err() without a new file = %v, want %v", err, fs.ErrNotExist)
	}
	j.path = dir
	j.line(Entry{Record: denial(2)})
	j.flush()
	got := j.entries(t)
	if err := j.err(); err != nil {
		t.Errorf("err() with a new file = %v, want nil", err)
	}
	if len(got) != 3 || got[1].Name != denial(2).Name || got[2].Count != 1 {
		t.Errorf("entries = %+v, want 3, the second for %s, the last with Count 1", got, denial(2).Name)
	}
}

// TestDecisionLogClose checks that close writes queued and counted records, and returns the
// error if it cannot.
func TestDecisionLogClose(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, decisionLogFile), []byte(`{"seq":7,"time":"2026-01-01T00:00:00Z","kind":"dns","allowed":false}`+"\n"+`{"seq":8,"ti`), 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := openDecisionLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		j.add(denial(1))
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	if got := j.entries(t); len(got) != 3 || times(got) != 4 || got[1].Seq != 8 {
		t.Errorf("entries after close = %+v, want 3 for 4 decisions, the second with Seq 8", got)
	}
	if j, err = openDecisionLog(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(j.path); err != nil {
		t.Fatal(err)
	}
	j.file.Close()
	j.add(denial(2))
	if err := j.close(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("close without a file: error %v, want %v", err, fs.ErrClosed)
	}
	if err := os.Mkdir(j.path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := openDecisionLog(dir); err == nil {
		t.Error("openDecisionLog of a directory succeeded, want an error")
	}
}

// TestDecisionLogCloseReportsFailures checks that close returns the errors of writing and
// closing the file.
func TestDecisionLogCloseReportsFailures(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/dev/full", filepath.Join(dir, decisionLogFile)); err != nil {
		t.Fatal(err)
	}
	full, err := openDecisionLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	full.add(denial(1))
	if err := full.close(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("close on a full disk: error %v, want %v", err, syscall.ENOSPC)
	}
	closed, err := openDecisionLog(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.file.Close(); err != nil {
		t.Fatal(err)
	}
	if err := closed.close(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("close of a closed file: error %v, want %v", err, fs.ErrClosed)
	}
	fine, err := openDecisionLog(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	fine.add(denial(1))
	if err := fine.close(); err != nil {
		t.Errorf("close of a log that was written: error %v, want nil", err)
	}
	obstructed := t.TempDir()
	if err := os.Mkdir(filepath.Join(obstructed, decisionLogFile), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := openDecisionLog(obstructed); err == nil {
		t.Error("openDecisionLog with a directory in its place succeeded, want an error")
	}
}

// TestServeOpensAllOrNone checks that a gateway's sockets replace those of a dead
// gateway and are removed at the end. If one of them cannot be created, none remains.
func TestServeOpensAllOrNone(t *testing.T) {
	dir := testenv.ShortDir(t)
	w := vm.NetSockets{Stream: filepath.Join(dir, "a", "stream"), Datagram: filepath.Join(dir, "b", "datagram"), API: filepath.Join(dir, "c", "api")}
	if err := os.MkdirAll(filepath.Join(w.API, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(w.Stream), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.Stream, nil, 0o600); err != nil { // left by a dead gateway
		t.Fatal(err)
	}
	s := &server{dir: dir, log: slog.New(slog.DiscardHandler), quit: make(chan struct{})}
	if err := s.serve(t.Context(), w); fail.CodeOf(err) != fail.Host || !strings.HasPrefix(err.Error(), "open the gateway's socket: ") {
		t.Errorf("serve with a directory in the place of a socket: error %v with code %v, want prefix %q, code %v", err, fail.CodeOf(err), "open the gateway's socket: ", fail.Host)
	}
	for _, path := range []string{w.Stream, w.Datagram} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Lstat(%s): error %v, want %v", path, err, fs.ErrNotExist)
		}
	}
}
