package ssh_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pkg/sftp"
	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// honest serves home as OpenSSH's sftp server would.
func honest(home string) func(xssh.Channel) {
	return func(ch xssh.Channel) {
		s, err := sftp.NewServer(ch, sftp.WithServerWorkingDirectory(home))
		if err != nil {
			panic(err)
		}
		_ = s.Serve()
		_ = ch.Close()
	}
}

func write(t *testing.T, name, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
}

// tree lists the entries below dir: name, mode, and content or target.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		b.WriteString(rel + " " + st.Mode().String())
		switch {
		case st.Mode().IsRegular():
			c, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			b.WriteString(" " + string(c))
		case st.Mode()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(p)
			b.WriteString(" -> " + to)
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestCopyThereAndBack(t *testing.T) {
	home, src, back := t.TempDir(), t.TempDir(), t.TempDir()
	c := serve(t, nil, honest(home)).dial(t)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	write(t, src+"/tree/run me.sh", "#!/bin/sh", 0o755)
	write(t, src+"/tree/deep/er/big", big, 0o640)
	write(t, src+"/tree/secret", "", 0o600)
	if err := os.Symlink("/etc/passwd", src+"/tree/link"); err != nil {
		t.Fatal(err)
	}
	var seen []string
	if err := c.CopyTo(t.Context(), src+"/tree", "~/", func(i ssh.Item) { seen = append(seen, fmt.Sprintf("%s %d", i.Name, i.Size)) }); err != nil {
		t.Fatal(err)
	}
	if got, want := tree(t, home), tree(t, src); got != want {
		t.Fatalf("in the guest:\n%.300s\nwant\n%.300s", got, want)
	}
	if got := strings.Join(seen, ","); got != "tree/deep/er/big 1048576,tree/link 0,tree/run me.sh 9,tree/secret 0" {
		t.Errorf("progress = %q, want every file of tree with its size", got)
	}
	// Copy again over the existing files, then back.
	if err := c.CopyTo(t.Context(), src+"/tree", "", nil); err != nil {
		t.Fatal(err)
	}
	err := c.CopyFrom(t.Context(), "tree", back, nil)
	left, ok := errors.AsType[*ssh.Incomplete](err)
	if !ok || left.Count != 1 || left.Error() != "left out 1: tree/link (symbolic link)" {
		t.Fatalf("CopyFrom = %v, want \"left out 1: tree/link (symbolic link)\"", err)
	}
	if err := os.Remove(src + "/tree/link"); err != nil {
		t.Fatal(err)
	}
	if got, want := tree(t, back), tree(t, src); got != want {
		t.Fatalf("back on the host:\n%.300s\nwant\n%.300s", got, want)
	}
	// Copy a file to a new name, and one that does not exist.
	if err := c.CopyFrom(t.Context(), "tree/run me.sh", back+"/other", nil); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(back + "/other"); err != nil || string(b) != "#!/bin/sh" {
		t.Errorf("copied file = %q, %v, want \"#!/bin/sh\"", b, err)
	}
	if err := c.CopyFrom(t.Context(), "nothing", back, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CopyFrom of a missing file = %v, want %v", err, fs.ErrNotExist)
	}
	if err := c.CopyTo(t.Context(), src+"/tree/secret", "no/such/dir/", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CopyTo a missing directory = %v, want %v", err, fs.ErrNotExist)
	}
}

func TestCopyFromWritesThroughNoLinkAndMasksModes(t *testing.T) {
	home, dir, victim := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "victim")
	c := serve(t, nil, honest(home)).dial(t)
	write(t, victim, "untouched", 0o600)
	write(t, home+"/d/file", "from the guest", 0o777|fs.ModeSetuid)
	write(t, home+"/d/sub/inner", "x", 0o000)
	if err := os.MkdirAll(dir+"/d", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, dir+"/d/file"); err != nil {
		t.Fatal(err)
	}
	if err := c.CopyFrom(t.Context(), "d", dir, nil); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "untouched" {
		t.Fatalf("file behind a link = %q, %v, want it untouched", b, err)
	}
	if st, err := os.Lstat(dir + "/d/file"); err != nil || st.Mode() != 0o755 {
		t.Errorf("mode of the copied file = %v, %v, want 0755", st.Mode(), err)
	}
	// A directory that is a link on the host is not entered.
	if err := errors.Join(os.RemoveAll(dir+"/d/sub"), os.Symlink(filepath.Dir(victim), dir+"/d/sub")); err != nil {
		t.Fatal(err)
	}
	if err := c.CopyFrom(t.Context(), "d", dir, nil); err == nil || !strings.Contains(err.Error(), "already exists") {
		t.Errorf("CopyFrom over a link = %v, want \"already exists\"", err)
	}
	// Copying into the guest does not follow a local link either.
	if err := c.CopyTo(t.Context(), dir+"/d/sub", "x", nil); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("CopyTo of a link = %v, want \"symbolic link\"", err)
	}
}

func TestCopyLeavesOutWhatIsNoFile(t *testing.T) {
	home, dir := t.TempDir(), t.TempDir()
	c := serve(t, nil, honest(home)).dial(t)
	write(t, home+"/d/.git/hooks/post-checkout", "evil", 0o755)
	write(t, home+"/d/sub/.GIT/config", "evil", 0o644)
	write(t, home+"/d/ok", "fine", 0o644)
	if err := syscall.Mkfifo(home+"/d/pipe", 0o644); err != nil {
		t.Fatal(err)
	}
	err := c.CopyFrom(t.Context(), "d", dir, nil)
	left, ok := errors.AsType[*ssh.Incomplete](err)
	if !ok || left.Count != 3 {
		t.Fatalf("CopyFrom = %v, want 3 left out", err)
	}
	if got := tree(t, dir+"/d"); got != "ok -rw-r--r-- fine\nsub drwxr-xr-x\n" {
		t.Errorf("copied files:\n%s\nwant ok and sub", got)
	}
	if err := c.CopyFrom(t.Context(), "d/pipe", dir, nil); err == nil || !strings.Contains(err.Error(), "named pipe") {
		t.Errorf("CopyFrom of a named pipe = %v, want \"named pipe\"", err)
	}
	if err := c.CopyFrom(t.Context(), "d/.git", dir, nil); err == nil {
		t.Error("CopyFrom of a .git directory = nil, want an error")
	}
}

// evil is a guest's file server that answers every listing with its entries.
type evil struct{ entries []fs.FileInfo }

type entry struct {
	name string
	mode fs.FileMode
	size int64
}

func (e entry) Name() string       { return e.name }
func (e entry) Size() int64        { return e.size }
func (e entry) Mode() fs.FileMode  { return e.mode }
func (e entry) ModTime() time.Time { return time.Time{} }
func (e entry) IsDir() bool        { return e.mode.IsDir() }
func (e entry) Sys() any           { return nil }

type zeros struct{}

func (zeros) ReadAt(p []byte, _ int64) (int, error) { clear(p); return len(p), nil }

func (e evil) Fileread(*sftp.Request) (io.ReaderAt, error) { return zeros{}, nil }

func (e evil) Filelist(r *sftp.Request) (sftp.ListerAt, error) {
	if r.Method == "Stat" {
		return listing{entry{name: "d", mode: fs.ModeDir | 0o755}}, nil
	}
	return listing(e.entries), nil
}

type listing []fs.FileInfo

func (l listing) ListAt(out []fs.FileInfo, off int64) (int, error) {
	if off >= int64(len(l)) {
		return 0, io.EOF
	}
	return copy(out, l[off:]), nil
}

func (e evil) serve(ch xssh.Channel) {
	_ = sftp.NewRequestServer(ch, sftp.Handlers{FileGet: e, FileList: e}).Serve()
	_ = ch.Close()
}

func TestCopyFromAHostileGuest(t *testing.T) {
	for name, tt := range map[string]struct {
		entry entry
		want  string
	}{
		"control characters":   {entry{name: "a\x1b[2J", mode: 0o644}, "name has unprintable characters"},
		"back slash":           {entry{name: `..\..\x`, mode: 0o644}, "invalid file name"},
		"invalid UTF-8":        {entry{name: "a\xff", mode: 0o644}, "invalid file name"},
		"hidden .git":          {entry{name: ".g\u200cit", mode: fs.ModeDir}, "repository data"},
		"device":               {entry{name: "sda", mode: fs.ModeDevice | 0o666}, "device file"},
		"endless file":         {entry{name: "zeros", mode: 0o644, size: 10}, "keeps growing"},
		"larger than the disk": {entry{name: "huge", mode: 0o644, size: 1 << 60}, "no space"},
		"endless depth":        {entry{name: "d", mode: fs.ModeDir | 0o755}, "deep"},
	} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			c := serve(t, nil, evil{[]fs.FileInfo{tt.entry}}.serve).dial(t)
			err := c.CopyFrom(t.Context(), "d", out+"/new", nil)
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.ContainsRune(err.Error(), 0x1b) {
				t.Fatalf("CopyFrom = %v, want %q without escapes", err, tt.want)
			}
			if got := tree(t, out); tt.entry.mode.IsRegular() && strings.Count(got, "\n") != 1 {
				t.Errorf("files after CopyFrom:\n%.300s\nwant 1", got)
			}
		})
	}
	// The library passes on only the last part of "../../x"; nothing escapes.
	t.Run("path as a name", func(t *testing.T) {
		out := t.TempDir()
		c := serve(t, nil, evil{[]fs.FileInfo{entry{name: "../../../escape", mode: fs.ModeDir | 0o755}}}.serve).dial(t)
		if err := c.CopyFrom(t.Context(), "d", out+"/a/b", nil); err == nil {
			t.Error("CopyFrom with an escaping name = nil, want an error")
		}
		if got := tree(t, out); strings.Contains(got, "escape") {
			t.Errorf("files after CopyFrom:\n%s\nwant none outside", got)
		}
	})
	t.Run("too many entries", func(t *testing.T) {
		var many []fs.FileInfo
		for range 400_000 {
			many = append(many, entry{name: strings.Repeat("n", 200), mode: 0o644})
		}
		c := serve(t, nil, evil{many}.serve).dial(t)
		if err := c.CopyFrom(t.Context(), "d", t.TempDir()+"/new", nil); err == nil || !strings.Contains(err.Error(), "too much data") {
			t.Errorf("CopyFrom of an endless answer = %v, want \"too much data\"", err)
		}
	})
}

// This sftp server sends truncated packets, on which the library panics.
func TestCopySurvivesMalformedAnswers(t *testing.T) {
	packet := func(kind byte, id uint32, rest ...byte) []byte {
		p := binary.BigEndian.AppendUint32(nil, uint32(5+len(rest)))
		return append(binary.BigEndian.AppendUint32(append(p, kind), id), rest...)
	}
	for name, answer := range map[string][]byte{
		"short handle": packet(102, 1, 0, 0),
		"short attrs":  packet(105, 1, 0xff),
		"short status": packet(101, 1),
		"short name":   packet(104, 1, 0, 0, 0, 9),
		"huge packet":  {0xff, 0xff, 0xff, 0xff},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, nil, func(ch xssh.Channel) {
				_, _ = ch.Write([]byte{0, 0, 0, 5, 2, 0, 0, 0, 3})
				_, _ = io.ReadFull(ch, make([]byte, 9))
				_, _ = io.ReadFull(ch, make([]byte, 9))
				_, _ = ch.Write(answer)
				_, _ = io.Copy(io.Discard, ch)
			})
			if err := s.dial(t).CopyFrom(t.Context(), "d", t.TempDir(), nil); err == nil {
				t.Fatal("CopyFrom with a malformed answer = nil, want an error")
			}
		})
	}
}

func TestCopyEndsWithItsContext(t *testing.T) {
	asked := make(chan struct{})
	c := serve(t, nil, func(ch xssh.Channel) { // never answers
		close(asked)
		_, _ = io.Copy(io.Discard, ch)
	}).dial(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if err := c.CopyFrom(ctx, "d", t.TempDir(), nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled CopyFrom = %v, want %v", err, context.Canceled)
	}
}
