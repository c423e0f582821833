package guestclient

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain makes this test binary a VM's process, or the guest program in the VM.
func TestMain(m *testing.M) {
	if os.Getenv("GUEST_TEST_PROGRAM") != "" {
		os.Exit(guestagent.Main("test", os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	testenv.Main(m, testenv.Commands{"fake-vm": fake.Main})
}

const taskID = "0123456789ab"

// world is a fake VM with a checkout.
type world struct {
	*testing.T
	target ssh.Target
	root   string
	work   string // the checkout
	base   string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	const name = "agent-o-r-012345"
	dir := t.TempDir()
	key, authorized, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	d, err := fake.New(fake.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), name); err != nil {
			t.Errorf("delete the VM: %v", err)
		}
	})
	if err := d.Create(t.Context(), vm.Spec{
		Name: name, CPUs: 2, Memory: 1 << 30, Disk: 4 << 30, User: User, AuthorizedKey: authorized, Image: vm.Image{Arch: "x86_64", Location: "/dev/null"},
	}); err != nil {
		t.Fatal(err)
	}
	ep, err := d.Start(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Inspect(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, target: ssh.Target{Addr: ep.Addr, User: ep.User, Key: key, HostKey: ep.HostKey}, root: m.Root, work: filepath.Join(m.Root, "home/agent/checkout")}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(w.root, programPath)
	if err := errors.Join(
		os.MkdirAll(filepath.Dir(program), 0o755), os.MkdirAll(w.work, 0o755),
		os.WriteFile(program, []byte("#!/bin/sh\nGUEST_TEST_PROGRAM=1 exec "+ssh.Quote(self)+" \"$@\"\n"), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	w.git("init", "-q")
	w.put("a", "1\n")
	w.git("add", "a")
	w.git("-c", "user.name=a", "-c", "user.email=a@localhost.invalid", "commit", "-qm", "base")
	w.base = w.git("rev-parse", "HEAD")
	return w
}

func (w *world) git(args ...string) string {
	w.Helper()
	cmd := exec.CommandContext(w.Context(), "git", args...)
	cmd.Dir = w.work
	out, err := cmd.CombinedOutput()
	if err != nil {
		w.Fatalf("git %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func (w *world) put(name, text string) {
	w.Helper()
	path := filepath.Join(w.work, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		w.Fatal(err)
	}
}

// dial opens a new connection to the guest; task is an attempt at a task over such a
// connection.
func (w *world) dial(target ssh.Target) *ssh.Client {
	w.Helper()
	c, err := ssh.Dial(w.Context(), target)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = c.Close() })
	return c
}

func (w *world) task(attempt int) Task {
	w.Helper()
	return Guest{SSH: w.dial(w.target), Root: w.root}.Task(taskID, attempt)
}

func (w *world) ask() guestproto.TaskCollect {
	return guestproto.TaskCollect{Dir: w.work, Base: w.base, MaxFiles: 1000, MaxBytes: 4 << 30}
}

func (w *world) place() (*os.Root, string) {
	w.Helper()
	dir := w.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = root.Close() })
	return root, dir
}

// files returns the files in a directory with their content.
func (w *world) files(dir string) map[string]string {
	w.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		all[name] = string(text)
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	return all
}

// relay is a connection to the guest that can be cut after a number of bytes.
type relay struct {
	addr string
	left atomic.Int64
	used atomic.Int64

	mu    sync.Mutex
	conns []net.Conn
}

func (w *world) relay() *relay {
	w.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.Fatal(err)
	}
	r := &relay{addr: l.Addr().String()}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", w.target.Addr)
			if err != nil {
				_ = in.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			all.Go(func() { _, _ = io.Copy(out, in); _ = out.Close() })
			all.Go(func() {
				_, _ = io.Copy(r.counting(in), out)
				_, _ = in.Close(), out.Close()
			})
		}
	})
	w.Cleanup(func() {
		_ = l.Close()
		r.mu.Lock()
		for _, c := range r.conns {
			_ = c.Close()
		}
		r.mu.Unlock()
		all.Wait()
	})
	return r
}

// counting passes on a number of bytes and then fails, at any point in the stream.
func (r *relay) counting(w io.Writer) io.Writer {
	return writer(func(p []byte) (int, error) {
		left := r.left.Add(-int64(len(p)))
		if left < 0 {
			n, _ := w.Write(p[:max(0, int64(len(p))+left)])
			return n, io.ErrClosedPipe
		}
		r.used.Add(int64(len(p)))
		return w.Write(p)
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestTaskInAGuest(t *testing.T) {
	w := newWorld(t)
	a := w.task(1)
	if s, err := a.Status(t.Context()); err != nil || s.State != guestproto.TaskNone {
		t.Fatalf("Status before the start = %+v, %v, want %s", s, err, guestproto.TaskNone)
	}
	script := `echo out; echo err >&2; while ! [ -e go ]; do sleep 0.02; done; echo changed >a; mkdir d; head -c 3000000 /dev/zero >d/zeros; echo more; exit 3`
	for range 2 {
		if s, err := a.Start(t.Context(), guestproto.TaskStart{Argv: []string{"sh", "-c", script}, Dir: w.work}); err != nil || s.State != guestproto.TaskRunning {
			t.Fatalf("Start = %+v, %v, want %s", s, err, guestproto.TaskRunning)
		}
	}
	var logs [2]bytes.Buffer
	var states []guestproto.TaskState
	follow := func(f TaskFrame) error {
		if f.Status != nil {
			states = append(states, f.Status.State)
			return nil
		}
		which := 0
		if f.Stderr {
			which = 1
		}
		if f.Offset != int64(logs[which].Len()) {
			t.Errorf("offset of a frame = %d, want %d", f.Offset, logs[which].Len())
		}
		logs[which].Write(f.Data)
		return nil
	}
	enough := errors.New("enough")
	err := a.Watch(t.Context(), TaskOffsets{}, func(f TaskFrame) error {
		if err := follow(f); err != nil {
			return err
		}
		if logs[0].Len() > 0 && logs[1].Len() > 0 && len(states) > 0 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || states[0] != guestproto.TaskRunning {
		t.Fatalf("Watch: error %v, states %v, want %v, %s first", err, states, enough, guestproto.TaskRunning)
	}
	w.put("go", "")
	states = nil
	again := w.task(1) // over another connection
	if err := again.Watch(t.Context(), TaskOffsets{Stdout: int64(logs[0].Len()), Stderr: int64(logs[1].Len())}, follow); err != nil {
		t.Fatal(err)
	}
	if stdout, stderr := logs[0].String(), logs[1].String(); stdout != "out\nmore\n" || stderr != "err\n" {
		t.Errorf("stdout %q, stderr %q, want %q, %q", stdout, stderr, "out\nmore\n", "err\n")
	}
	if last := states[len(states)-1]; last != guestproto.TaskExited {
		t.Errorf("last state = %s, want %s", last, guestproto.TaskExited)
	}
	s, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Result == nil || s.Result.ExitCode != 3 {
		t.Errorf("Status after the end: %s with result %+v, want exit code 3", s.State, s.Result)
	}
	if err := a.Watch(t.Context(), TaskOffsets{Stdout: 100}, follow); !errors.Is(err, ErrTruncated) {
		t.Errorf("Watch from beyond the end: error %v, want %v", err, ErrTruncated)
	}

	c, err := a.Collect(t.Context(), w.ask())
	if err != nil {
		t.Fatal(err)
	}
	root, dir := w.place()
	for range 2 { // the second time nothing is missing
		got, err := a.Receive(t.Context(), root, c)
		if err != nil || len(got) != 4 {
			t.Fatalf("Receive = %+v, %v, want 4 artifacts", got, err)
		}
	}
	files := w.files(dir)
	if patch := files[taskID+".patch"]; !strings.Contains(patch, "-1\n+changed\n") {
		t.Errorf("patch = %.300q, want %q in it", patch, "-1\n+changed\n")
	}
	if got, want := files[taskID+"-untracked.txt"], "d/zeros\ngo\n"; got != want {
		t.Errorf("list of untracked files = %q, want %q", got, want)
	}
	if got := files["untracked/d/zeros"]; got != strings.Repeat("\x00", 3000000) {
		t.Errorf("d/zeros has %d bytes, %.20q, want %d zero bytes", len(got), got, 3000000)
	}
	if len(files) != 4 {
		t.Errorf("received %q, want 4 files", slices.Sorted(maps.Keys(files)))
	}

	// Another collection replaces this one.
	if err := os.RemoveAll(filepath.Join(w.work, "d")); err != nil {
		t.Fatal(err)
	}
	w.put("d", "a file now")
	if c, err = a.Collect(t.Context(), w.ask()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Receive(t.Context(), root, c); err != nil {
		t.Fatal(err)
	}
	if files := w.files(dir); files["untracked/d"] != "a file now" || len(files) != 4 {
		t.Errorf("received %q, d = %.100q, want 4 files, %q", slices.Sorted(maps.Keys(files)), files["untracked/d"], "a file now")
	}
}

func TestSignalATask(t *testing.T) {
	w := newWorld(t)
	a := w.task(1)
	if _, err := a.Start(t.Context(), guestproto.TaskStart{Argv: []string{"sleep", "1000"}, Dir: w.work}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Signal(t.Context(), Terminate); err != nil {
		t.Fatal(err)
	}
	var last guestproto.TaskStatus
	if err := a.Watch(t.Context(), TaskOffsets{}, func(f TaskFrame) error {
		if f.Status != nil {
			last = *f.Status
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if last.Result == nil || last.Result.Signal != "TERM" || last.Result.ExitCode != 143 {
		t.Errorf("last status: %s with result %+v, want signal TERM, exit code 143", last.State, last.Result)
	}
	for _, bad := range []Task{{Guest: a.Guest, ID: "../../etc", Attempt: 1}, {Guest: a.Guest, ID: taskID, Attempt: 0}, {Guest: a.Guest, ID: "0123456789ab/1;id", Attempt: 1}} {
		if s, err := bad.Status(t.Context()); err == nil {
			t.Errorf("Status of task %q, attempt %d = %+v, want an error", bad.ID, bad.Attempt, s)
		}
	}
}

// TestKilledQueries checks that a query whose program is killed, as by a guest that shuts down, does not
// count as an answer. An agent's signal, above, is one.
func TestKilledQueries(t *testing.T) {
	w := newWorld(t)
	a := w.task(1)
	if err := os.WriteFile(filepath.Join(w.root, programPath), []byte("#!/bin/sh\nkill -s KILL $$\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, status := a.Status(t.Context())
	for what, err := range map[string]error{"Status": status, "Watch": a.Watch(t.Context(), TaskOffsets{}, func(TaskFrame) error { return nil })} {
		if !errors.Is(err, ssh.ErrUnreachable) {
			t.Errorf("%s, killed = %v, want %v", what, err, ssh.ErrUnreachable)
		}
	}
}

// TestReceiveOverAConnectionThatDies checks that a connection that dies at any point
// costs only the data in transit.
func TestReceiveOverAConnectionThatDies(t *testing.T) {
	w := newWorld(t)
	random := rand.New(rand.NewPCG(3, 4))
	noise := make([]byte, 2_500_000)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	w.put("noise", string(noise))
	w.put("sparse", string(make([]byte, 700_000))+"end")
	for i := range 20 {
		w.put(fmt.Sprintf("small/%d", i), strings.Repeat("same", i%3))
	}
	c, err := w.task(1).Collect(t.Context(), w.ask())
	if err != nil {
		t.Fatal(err)
	}
	relay := w.relay()
	root, dir := w.place()
	var got []guestproto.Artifact
	deaths := 0
	for got == nil {
		relay.left.Store(5000 + random.Int64N(900_000)) // usually enough to log in
		target := w.target
		target.Addr = relay.addr
		conn, err := ssh.Dial(t.Context(), target)
		if err == nil {
			got, err = Guest{SSH: conn, Root: w.root}.Task(taskID, 1).Receive(t.Context(), root, c)
			_ = conn.Close()
		}
		if err != nil {
			if deaths++; !errors.Is(err, ssh.ErrUnreachable) || deaths > 500 {
				t.Fatalf("Receive over connection %d: error %v, want %v, and success within 500", deaths, err, ssh.ErrUnreachable)
			}
		}
	}
	if deaths < 3 {
		t.Errorf("%d connections died, want at least 3", deaths)
	}
	// No single connection carries all of it, so some data must survive each one. How
	// much is lost in transit depends on how busy the machine is.
	if sent := relay.used.Load(); sent > 10*3_200_000 {
		t.Errorf("%d bytes were sent over %d connections, want at most %d", sent, deaths+1, 10*3_200_000)
	}
	want := map[string]string{"untracked/noise": string(noise), "untracked/sparse": string(make([]byte, 700_000)) + "end"}
	for i := range 20 {
		want[fmt.Sprintf("untracked/small/%d", i)] = strings.Repeat("same", i%3)
	}
	files := w.files(dir)
	for name, text := range want {
		if files[name] != text {
			t.Errorf("%s has %d bytes, want %d equal to the original", name, len(files[name]), len(text))
		}
	}
	if len(files) != len(want)+1 {
		t.Errorf("received %q, want %d files", slices.Sorted(maps.Keys(files)), len(want)+1)
	}
}

func TestReceiveWhatChanged(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"same", "gone", "other", "resumed", "stale"} {
		w.put(name, strings.Repeat(name, 100_000))
	}
	a := w.task(1)
	c, err := a.Collect(t.Context(), w.ask())
	if err != nil {
		t.Fatal(err)
	}
	root, dir := w.place()
	w.put("other", strings.Repeat("OTHER", 100_000)) // the same length
	if err := os.Remove(filepath.Join(w.work, "gone")); err != nil {
		t.Fatal(err)
	}
	begin := func(name, text string) {
		t.Helper()
		i := slices.IndexFunc(c.Artifacts, func(a guestproto.Artifact) bool { return a.Name == "untracked/"+name })
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, partDir), 0o700), os.WriteFile(filepath.Join(dir, partDir, c.Artifacts[i].SHA256), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	begin("resumed", strings.Repeat("resumed", 50_000))
	begin("stale", strings.Repeat("\x00", 1000)) // as left by a power cut
	for name, text := range map[string]string{"untracked/same": "something else", "files/old": "of a collection before", "untracked/old/x": "too"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := a.Receive(t.Context(), root, c)
	if err != nil {
		t.Fatal(err)
	}
	skipped := map[string]string{}
	for _, a := range got {
		if a.Skipped != "" {
			skipped[a.Name] = a.Skipped
		}
	}
	if len(skipped) != 2 || !strings.Contains(skipped["untracked/gone"], "no longer exists") || !strings.Contains(skipped["untracked/other"], "changed") {
		t.Errorf("skipped %v, want gone, which no longer exists, and other, which changed", skipped)
	}
	files := w.files(dir)
	for _, name := range []string{"same", "resumed", "stale"} {
		if got, want := files["untracked/"+name], strings.Repeat(name, 100_000); got != want {
			t.Errorf("%s = %.40q (%d bytes), want %.40q (%d bytes)", name, got, len(got), want, len(want))
		}
	}
	if len(files) != 4 {
		t.Errorf("received %q, want 4 files", slices.Sorted(maps.Keys(files)))
	}
	if _, err := a.Collect(t.Context(), w.ask()); err != nil {
		t.Fatal(err)
	}
	empty, _ := w.place()
	if _, err := a.Receive(t.Context(), empty, c); !errors.Is(err, ErrNoCollection) {
		t.Errorf("Receive of a collection that was replaced: error %v, want %v", err, ErrNoCollection)
	}
}

// TestReceiveALargeSparseFile checks that a file of 2 GiB that is nearly all hole is
// received without using space on the disk.
func TestReceiveALargeSparseFile(t *testing.T) {
	if testing.Short() {
		t.Skip("moves 2 GiB")
	}
	w := newWorld(t)
	f, err := os.Create(filepath.Join(w.work, "huge"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("end"), 2<<30-3); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	a := w.task(1)
	c, err := a.Collect(t.Context(), w.ask())
	if err != nil {
		t.Fatal(err)
	}
	root, _ := w.place()
	began := time.Now()
	if _, err := a.Receive(t.Context(), root, c); err != nil {
		t.Fatal(err)
	}
	t.Logf("2 GiB came within %v", time.Since(began))
	info, err := root.Stat("untracked/huge")
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() != 2<<30 {
		t.Fatalf("size of the received file = %d, want %d", info.Size(), int64(2<<30))
	}
	if used := diskUse(info); used > 64<<20 {
		t.Errorf("the received file uses %d bytes of the disk, want at most %d", used, 64<<20)
	}
}

// says makes the guest send the given frames.
func (w *world) says(frames string) Task {
	w.Helper()
	if err := os.WriteFile(filepath.Join(w.root, "frames"), []byte(frames), 0o600); err != nil {
		w.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.root, programPath), []byte("#!/bin/sh\ncat >/dev/null & exec cat "+ssh.Quote(filepath.Join(w.root, "frames"))+"\n"), 0o755); err != nil {
		w.Fatal(err)
	}
	return w.task(1)
}

func frame(kind guestproto.FrameKind, data string) string {
	var b bytes.Buffer
	if err := guestproto.WriteFrame(&b, kind, []byte(data)); err != nil {
		panic(err)
	}
	return b.String()
}

// TestAGuestThatLies checks that, whatever a guest sends, nothing is created outside
// the directory, nothing is accepted without its checksum, and nothing exceeds the
// bounds.
func TestAGuestThatLies(t *testing.T) {
	w := newWorld(t)
	hash := func(text string) string { sum := sha256.Sum256([]byte(text)); return hex.EncodeToString(sum[:]) }
	artifact := func(name, text string) string {
		return frame('a', fmt.Sprintf(`{"name":%q,"size":%d,"sha256":%q}`, name, len(text), hash(text)))
	}
	end := frame('z', `{"id":"0123456789abcdef","artifacts":null}`)
	ask := w.ask()
	ask.MaxFiles, ask.MaxBytes = 3, 10
	for name, stream := range map[string]string{
		"nothing":            "",
		"no end":             artifact("files/x", "x"),
		"out of it":          artifact("files/../../x", "x") + end,
		"an absolute path":   artifact("/etc/x", "x") + end,
		"another's patch":    artifact("ffffffffffff.patch", "x") + end,
		"a part":             artifact(".part/x", "x") + end,
		"twice":              artifact("files/x", "x") + artifact("files/x", "y") + end,
		"too many":           artifact("files/1", "") + artifact("files/2", "") + artifact("files/3", "") + artifact("files/4", "") + end,
		"too large":          artifact("files/1", "123456") + artifact("files/2", "12345") + end,
		"overflowing":        frame('a', `{"name":"files/1","size":9223372036854775807,"sha256":"`+hash("")+`"}`) + end,
		"an end of another":  frame('z', `{"id":"../../../../x"}`),
		"more after the end": end + artifact("files/x", "x"),
		"output":             frame('o', "x") + end,
		"no frames":          "\x1b]52;c;aGk=\x07",
		"skips without end":  strings.Repeat(frame('a', `{"name":"x","size":0,"skipped":"x"}`), guestproto.MaxTaskSkipped+1) + end,
		"a failure":          frame('f', `{"kind":"x","text":"\u001b[2J"}`),
	} {
		c, err := w.says(stream).Collect(t.Context(), ask)
		if err == nil {
			t.Errorf("%s: Collect = %+v, want an error", name, c)
		} else if strings.ContainsAny(err.Error(), "\x1b\x07") {
			t.Errorf("%s: Collect: error %q, want it without control characters", name, err)
		}
	}
	two := guestproto.Collection{ID: "0123456789abcdef", Artifacts: []guestproto.Artifact{{Name: "files/x", Size: 3, SHA256: hash("abc")}, {Name: "files/y", Size: 3, SHA256: hash("def")}}}
	first, second := frame('i', `{"index":0,"offset":0}`), frame('i', `{"index":1,"offset":0}`)
	whole := first + frame('d', "abc") + frame('z', "") + second + frame('d', "def") + frame('z', "")
	for name, stream := range map[string]string{
		"nothing":          "",
		"half":             first + frame('d', "ab"),
		"half of the last": first + frame('d', "abc") + frame('z', "") + second + frame('d', "de"),
		"one":              first + frame('d', "abc") + frame('z', ""),
		"too little":       first + frame('d', "ab") + frame('z', ""),
		"too much":         first + frame('d', "abcd") + frame('z', ""),
		"another order":    second + frame('d', "def") + frame('z', "") + first + frame('d', "abc") + frame('z', ""),
		"another offset":   frame('i', `{"index":0,"offset":1}`) + frame('d', "bc") + frame('z', ""),
		"no such file":     frame('i', `{"index":7,"offset":0}`),
		"none at all":      frame('d', "abc"),
		"one within one":   first + second,
		"one too many":     whole + first,
		"bytes of nothing": first + frame('d', ""),
		"not JSON":         frame('i', "\x1b"),
	} {
		root, dir := w.place()
		if got, err := w.says(stream).Receive(t.Context(), root, two); err == nil {
			t.Errorf("%s: Receive = %+v, want an error", name, got)
		} else if strings.ContainsAny(err.Error(), "\x1b\x07") {
			t.Errorf("%s: Receive: error %q, want it without control characters", name, err)
		}
		for file, text := range w.files(dir) {
			if !strings.HasPrefix(file, partDir) && text != "abc" && text != "def" {
				t.Errorf("%s: content of %s = %q, want %q or %q", name, file, text, "abc", "def")
			}
		}
	}
	clean, dir := w.place()
	got, err := w.says(first+frame('d', "abX")+frame('z', "")+second+frame('f', `{"kind":"item","text":"no\u001b"}`)).Receive(t.Context(), clean, two)
	if err != nil || len(got) != 2 || got[0].Skipped == "" || got[1].Skipped != "no\ufffd" || len(w.files(dir)) != 0 {
		t.Errorf("Receive of two bad files = %+v, %v, files %q, want both skipped, no files", got, err, w.files(dir))
	}
	// A file below another file.
	below := guestproto.Collection{ID: two.ID, Artifacts: []guestproto.Artifact{{Name: "files/x", Size: 3, SHA256: hash("abc")}, {Name: "files/x/y", Size: 3, SHA256: hash("def")}}}
	got, err = w.says(whole).Receive(t.Context(), clean, below)
	if err != nil || got[0].Skipped != "" || !strings.Contains(got[1].Skipped, "another artifact has this path") {
		t.Errorf("Receive of a file below another = %+v, %v, want the second skipped with %q", got, err, "another artifact has this path")
	}

	status := func(s string) string { return frame('s', `{"version":1,"time":"2026-01-01T00:00:00Z",`+s+`}`) }
	done := status(`"state":"exited","stdout":3,"stderr":0,"result":{"exit_code":0,"started":"2026-01-01T00:00:00Z","ended":"2026-01-01T00:00:00Z","user_ms":0,"system_ms":0,"max_rss":0,"stdout":3,"stderr":0}`)
	for name, c := range map[string]struct {
		stream string
		from   TaskOffsets
		want   string
	}{
		"well":              {status(`"state":"running","stdout":0,"stderr":0`) + frame('o', "abc") + done, TaskOffsets{}, ""},
		"less than it had":  {frame('o', "ab") + done, TaskOffsets{}, ErrTruncated.Error()},
		"all that we want":  {frame('o', "ab") + done, TaskOffsets{Max: 2}, ""},
		"more than we want": {frame('o', "abc") + done, TaskOffsets{Max: 2}, "more than the requested 2 bytes"},
		"no end":            {frame('o', "abc"), TaskOffsets{}, errEnded.Error()},
		"more after it":     {frame('o', "abc") + done + done, TaskOffsets{}, "after the end"},
		"no bytes":          {frame('o', ""), TaskOffsets{}, "unexpected frame"},
		"artifacts":         {artifact("files/x", "x"), TaskOffsets{}, "unexpected frame"},
		"a state of none":   {status(`"state":"happy"`), TaskOffsets{}, "unknown state"},
		"a failure":         {frame('f', `{"kind":"truncated","text":""}`), TaskOffsets{}, ErrTruncated.Error()},
	} {
		err := w.says(c.stream).Watch(t.Context(), c.from, func(TaskFrame) error { return nil })
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: Watch: error %v, want %q", name, err, c.want)
		}
	}
}

// diskUse returns how much disk space a file occupies.
func diskUse(info fs.FileInfo) int64 { return info.Sys().(*syscall.Stat_t).Blocks * 512 }

// TestBegunFilesDoNotPileUp checks that partial files which a guest no longer lists are
// removed. Otherwise a guest that lists other files after each lost connection would
// fill the disk.
func TestBegunFilesDoNotPileUp(t *testing.T) {
	w := newWorld(t)
	root, dir := w.place()
	for i := range 5 {
		sum := sha256.Sum256([]byte{byte(i)})
		c := guestproto.Collection{ID: "0123456789abcdef", Artifacts: []guestproto.Artifact{{Name: "files/x", Size: 1000, SHA256: hex.EncodeToString(sum[:])}}}
		half := frame('i', `{"index":0,"offset":0}`) + frame('d', strings.Repeat("x", 900))
		if _, err := w.says(half).Receive(t.Context(), root, c); err == nil {
			t.Fatal("Receive of half a file succeeded, want an error")
		}
		if parts := w.files(filepath.Join(dir, partDir)); len(parts) != 1 || len(parts[hex.EncodeToString(sum[:])]) != 900 {
			t.Errorf("after collection %d: %d partial files, want one of 900 bytes", i, len(parts))
		}
	}
}
