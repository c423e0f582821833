package ssh

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/pkg/sftp"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// A copy leaves 256 MiB of the host's disk free, whatever size the guest reports.
func TestCopyKeepsTheReserve(t *testing.T) {
	const reserve = 256 << 20
	for _, c := range []struct {
		size int64
		free uint64
		ok   bool
	}{
		{0, reserve, true},
		{1, reserve, false},
		{0, reserve - 1, false},
		{1 << 30, reserve + 1<<30, true},
		{1<<30 + 1, reserve + 1<<30, false},
		{1 << 30, 1 << 30, false},
		{1 << 30, 0, false},
		{-1, 1 << 40, false},
		{math.MaxInt64, math.MaxUint64, true},
		{math.MinInt64, math.MaxUint64, false},
	} {
		err := fits(c.size, c.free)
		if (err == nil) != c.ok || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%d are free, and %d must stay free", c.free, reserve)) {
			t.Errorf("fits(%d, %d) = %v, want it to fit: %t", c.size, c.free, err, c.ok)
		}
	}
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := checkFreeSpace(dir, math.MaxInt64); err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("checkFreeSpace of more than any disk = %v, want \"no space\"", err)
	}
	if err := checkFreeSpace(dir, 0); err != nil {
		t.Errorf("checkFreeSpace for an empty file = %v, want nil", err)
	}
	_ = dir.Close()
	if err := checkFreeSpace(dir, 0); err == nil {
		t.Error("checkFreeSpace of an unreadable directory = nil, want an error")
	}
}

// These are the names that a guest may create on the host.
func TestBadName(t *testing.T) {
	for name, want := range map[string]string{
		"a": "", "...": "", ".gitignore": "", "git": "", "ä b": "", strings.Repeat("n", 255): "", ".git ": "",
		"": "invalid", ".": "invalid", "..": "invalid", strings.Repeat("n", 256): "invalid", "a/b": "invalid", "a\\b": "invalid", "a\xff": "invalid",
		"a\x00": "printable", "a\n": "printable", "a\x7f": "printable", "a\u0085": "printable", "a\u202eb": "printable", "a\u2028": "printable", "a\u2029": "printable",
		".git": "repository data", ".GIT": "repository data", ".g\u200dit": "repository data", "\u00ad.git": "repository data",
	} {
		if why := badName(name); want == "" && why != "" || !strings.Contains(why, want) {
			t.Errorf("badName(%.20q) = %q, want %q", name, why, want)
		}
	}
}

func TestOddKind(t *testing.T) {
	for mode, want := range map[fs.FileMode]string{
		0o644: "", fs.ModeDir: "", fs.ModeSymlink: "symbolic link", fs.ModeNamedPipe: "named pipe", fs.ModeSocket: "socket",
		fs.ModeDevice: "device file", fs.ModeDevice | fs.ModeCharDevice: "device file", fs.ModeIrregular: "file of unknown kind",
	} {
		if got := oddKind(mode); got != want {
			t.Errorf("oddKind(%v) = %q, want %q", mode, got, want)
		}
	}
}

func TestRemotePath(t *testing.T) {
	for p, want := range map[string]string{"": ".", "~": ".", "~/": ".", "~/a": "a", "a": "a", "/a": "/a", "~a": "~a", "a/~/b": "a/~/b"} {
		if got := remotePath(p); got != want {
			t.Errorf("remotePath(%q) = %q, want %q", p, got, want)
		}
	}
}

// A copy is bounded, and reports the entries that it left out.
func TestTransferIsBounded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var seen []Item
	tr := &transfer{ctx: ctx, answers: &budget{}, progress: func(i Item) { seen = append(seen, i) }}
	if err := tr.step(copyDepth); err != nil || tr.answers.left.Load() != replyBudget {
		t.Errorf("step into the deepest directory = %v, %d bytes left, want nil, %d", err, tr.answers.left.Load(), replyBudget)
	}
	if err := tr.step(copyDepth + 1); err == nil || err.Error() != "directories more than 64 deep" {
		t.Errorf("step into a deeper directory = %v, want \"directories more than 64 deep\"", err)
	}
	tr.entries = copyEntries - 1
	if err := tr.step(0); err != nil {
		t.Errorf("step for the last file = %v, want nil", err)
	}
	if err := tr.step(0); err == nil || err.Error() != "more than 200000 files" {
		t.Errorf("step for one file more = %v, want \"more than 200000 files\"", err)
	}
	tr.copied("a\x1b[2J\nb", 5)
	for i := range shownLeft + 1 {
		tr.leaveOut(fmt.Sprintf("\x1b[2J%d", i), "why")
	}
	if len(seen) != shownLeft+2 || seen[0] != (Item{Name: "a b", Size: 5}) || seen[1] != (Item{Name: "0", LeftOut: "why"}) {
		t.Errorf("items reported = %d, the first %+v, want %d from \"a b\"", len(seen), seen[:2], shownLeft+2)
	}
	if text := tr.left.Error(); tr.left.Count != 21 || !strings.HasPrefix(text, "left out 21: 0 (why), 1 (why), ") || !strings.HasSuffix(text, "19 (why), …") {
		t.Errorf("Incomplete of 21 = %q (count %d), want the first 20, then …", text, tr.left.Count)
	}
	if text := (&Incomplete{Count: 1, Items: []Item{{Name: "a", LeftOut: "b"}}}).Error(); text != "left out 1: a (b)" {
		t.Errorf("Incomplete of 1 = %q, want \"left out 1: a (b)\"", text)
	}
	quiet := &transfer{ctx: ctx}
	quiet.copied("a", 1)
	quiet.leaveOut("b", "why") // without progress
	cancel()
	if err := tr.step(0); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled step = %v, want %v", err, context.Canceled)
	}
}

// A guest's stream is cut off when it exceeds its budget.
func TestBudget(t *testing.T) {
	heard := 0
	b := &budget{r: strings.NewReader("12345"), heard: func() { heard++ }}
	b.reset(5)
	p := make([]byte, 4)
	if n, err := b.Read(p); n != 4 || err != nil || b.isSpent() || heard != 1 {
		t.Errorf("first Read = %d, %v, spent %t, called %d times, want 4, nil, false, 1", n, err, b.isSpent(), heard)
	}
	if n, err := b.Read(p); n != 0 || !errors.Is(err, errBudget) || !b.isSpent() || heard != 2 {
		t.Errorf("Read over the budget = %d, %v, spent %t, called %d times, want 0, %v, true, 2", n, err, b.isSpent(), heard, errBudget)
	}
	if _, err := b.Read(p); !errors.Is(err, io.EOF) || heard != 2 {
		t.Errorf("Read of the ended reader = %v, called %d times, want %v, 2", err, heard, io.EOF)
	}
}

func TestRemoteError(t *testing.T) {
	spent := &transfer{answers: &budget{}}
	tr := &transfer{answers: &budget{}}
	tr.answers.reset(1)
	for _, c := range []struct {
		t    *transfer
		err  error
		is   error
		want string
	}{
		{tr, fs.ErrNotExist, fs.ErrNotExist, "read a in the guest: file does not exist"},
		{tr, sftp.ErrSSHFxConnectionLost, ErrUnreachable, "read a in the guest: " + ErrUnreachable.Error() + ": the connection was lost"},
		{tr, io.ErrUnexpectedEOF, ErrUnreachable, "read a in the guest: " + ErrUnreachable.Error() + ": the connection was lost"},
		{spent, io.ErrUnexpectedEOF, nil, "read a in the guest: the guest sent too much data"},
		{tr, errors.New("\x1b[2Jodd\n"), nil, "read a in the guest: odd"},
	} {
		if err := c.t.remoteError("read", "\x1b[2Ja", c.err); err.Error() != c.want || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("remoteError(%v) = %q, want %q", c.err, err, c.want)
		}
	}
}

// A file that keeps growing, or that cannot be read or written, fails the copy.
func TestReceive(t *testing.T) {
	tr := &transfer{ctx: t.Context(), answers: &budget{}, buf: make([]byte, 4)}
	for _, c := range []struct {
		name  string
		src   io.Reader
		limit int64
		want  string
	}{
		{"what just fits", strings.NewReader("12345"), 5, ""},
		{"a byte more", strings.NewReader("12345"), 4, "keeps growing"},
		{"a broken stream", io.MultiReader(strings.NewReader("12345"), iotest.ErrReader(errors.New("odd"))), 9, "odd"},
	} {
		var dst bytes.Buffer
		n, err := tr.receive(&dst, c.src, "r", c.limit)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || err == nil && (n != 5 || dst.String() != "12345") {
			t.Errorf("receive %s = %d bytes %q, %v, want %q", c.name, n, dst.String(), err, c.want)
		}
	}
	r, w := io.Pipe()
	_ = r.Close()
	if _, err := tr.receive(w, strings.NewReader("12345"), "r", 9); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("receive to a broken writer = %v, want %v", err, io.ErrClosedPipe)
	}
}

func TestGateAndExitError(t *testing.T) {
	var out bytes.Buffer
	g := &gate{w: &out}
	_, _ = g.Write([]byte("a"))
	g.close()
	if n, err := g.Write([]byte("b")); n != 1 || err != nil || out.String() != "a" {
		t.Errorf("Write to a closed gate = %d, %v, output %q, want 1, nil, \"a\"", n, err, out.String())
	}
	if got := (&ExitError{Code: 130, Signal: "INT"}).Error(); got != "killed by signal INT" {
		t.Errorf("ExitError with a signal = %q, want \"killed by signal INT\"", got)
	}
	if got := (&ExitError{Code: 3}).Error(); got != "exit status 3" {
		t.Errorf("ExitError = %q, want \"exit status 3\"", got)
	}
	if got := brief(strings.Repeat("x", 300)); len(got) != 300 {
		t.Errorf("brief of 300 bytes = %d bytes, want 300", len(got))
	}
	if got := brief(strings.Repeat("x", 301)); len(got) > 304 || !strings.HasPrefix(got, strings.Repeat("x", 290)) {
		t.Errorf("brief of 301 bytes = %d bytes, want at most 304 with the first 290", len(got))
	}
}

// ListenRelay accepts only paths that macOS accepts, and replaces the socket of a
// dead process.
func TestListenRelay(t *testing.T) {
	dir := testenv.ShortDir(t)
	for n, ok := range map[int]bool{socketBound: true, socketBound + 1: false} {
		path := filepath.Join(dir, strings.Repeat("s", n-len(dir)-1))
		l, err := ListenRelay(path)
		if (err == nil) != ok {
			t.Errorf("ListenRelay on a path of %d bytes = %v, want it accepted: %t", n, err, ok)
		}
		if err == nil {
			_ = l.Close()
		}
	}
	full := filepath.Join(dir, "dir")
	if err := os.MkdirAll(filepath.Join(full, "file"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenRelay(full); err == nil || !strings.HasPrefix(err.Error(), "remove the old socket: ") {
		t.Errorf("ListenRelay on a directory = %v, want \"remove the old socket: …\"", err)
	}
}

// A cancelled input is not read any more, and keeps no descriptor.
func TestInputCancel(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	in, err := newInput(r)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := in.Read(make([]byte, 8))
		ended <- err
	}()
	in.cancel()
	if err := <-ended; !errors.Is(err, errCancelled) {
		t.Errorf("cancelled Read = %v, want %v", err, errCancelled)
	}
	in.cancel() // a second time
	if _, err := w.WriteString("key"); err != nil {
		t.Fatal(err)
	}
	if n, err := in.Read(make([]byte, 8)); n != 0 || !errors.Is(err, errCancelled) || in.failure() != nil {
		t.Errorf("Read after the cancel = %d, %v, failure %v, want 0, %v, nil", n, err, in.failure(), errCancelled)
	}
	for i, f := range in.wake {
		if _, err := f.Stat(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("end %d of the pipe = %v, want it closed", i, err)
		}
	}
	typed := make([]byte, 3)
	if _, err := io.ReadFull(r, typed); err != nil || string(typed) != "key" {
		t.Errorf("typed text = %q, %v, want \"key\"", typed, err)
	}
	failing, err := newInput(iotest.ErrReader(io.ErrClosedPipe))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := failing.Read(nil); !errors.Is(err, io.ErrClosedPipe) || !errors.Is(failing.failure(), io.ErrClosedPipe) {
		t.Errorf("Read of a failing reader = %v, failure %v, want %v twice", err, failing.failure(), io.ErrClosedPipe)
	}
	ending, _ := newInput(strings.NewReader(""))
	if _, err := ending.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || ending.failure() != nil {
		t.Errorf("Read at the end = %v, failure %v, want %v, nil", err, ending.failure(), io.EOF)
	}
}

// A file that was replaced with a link after the check is not followed.
func TestUploadFollowsNoLink(t *testing.T) {
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := errors.Join(dir.WriteFile("secret", nil, 0o600), dir.WriteFile("other", nil, 0o600), dir.Symlink("secret", "link")); err != nil {
		t.Fatal(err)
	}
	tr := &transfer{ctx: t.Context(), answers: &budget{}}
	for _, looked := range []string{"link", "other"} { // the file that was there at the time of the check
		st, err := dir.Lstat(looked)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.uploadFile(dir, "link", "remote", "link", st); !errors.Is(err, errReplaced) || !strings.HasPrefix(err.Error(), "copy link: ") {
			t.Errorf("uploadFile of a link = %v, want \"copy link: …\" with %v", err, errReplaced)
		}
	}
	if err := tr.upload(dir, "nothing", "remote", "nothing", 0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("upload of a missing file = %v, want %v", err, fs.ErrNotExist)
	}
}

// select(2) takes no descriptor of FD_SETSIZE or more: its set has no bit for it.
func TestInputWithManyOpenFiles(t *testing.T) {
	in, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatalf("open more than %d files: %v", unix.FD_SETSIZE, err)
		}
		defer f.Close()
		if f.Fd() >= unix.FD_SETSIZE-1 {
			break
		}
	}
	got, err := newInput(in)
	if err != nil {
		t.Fatal(err)
	}
	if got.file != nil {
		t.Errorf("newInput uses select(2) with descriptor %d, want plain reads", got.wake[0].Fd())
	}
}
