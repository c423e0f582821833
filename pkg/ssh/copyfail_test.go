package ssh_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pkg/sftp"
	xssh "golang.org/x/crypto/ssh"
)

// failing is a guest's file server that takes everything but what fails. It has the
// file that there names, and no other.
type failing struct{ fails, there string }

var errGuest = errors.New("the guest's disk is full")

func (f failing) fail(op string) error {
	if f.fails == op {
		return errGuest
	}
	return nil
}

func (f failing) Fileread(*sftp.Request) (io.ReaderAt, error) { return zeros{}, f.fail("Read") }

func (f failing) Filewrite(*sftp.Request) (io.WriterAt, error) { return f, f.fail("Open") }

func (f failing) WriteAt(p []byte, _ int64) (int, error) { return len(p), f.fail("Write") }

func (f failing) Close() error { return f.fail("Close") }

func (f failing) Filecmd(r *sftp.Request) error {
	if r.Method == "Rmdir" { // which the library tries where it cannot remove a file
		return f.fail("Remove")
	}
	return f.fail(r.Method)
}

func (f failing) Filelist(r *sftp.Request) (sftp.ListerAt, error) {
	if f.there == "" || filepath.Base(r.Filepath) != f.there {
		return nil, os.ErrNotExist
	}
	return listing{entry{name: f.there, mode: 0o644, size: 10}}, nil
}

func (f failing) serve(ch xssh.Channel) {
	_ = sftp.NewRequestServer(ch, sftp.Handlers{FileGet: f, FilePut: f, FileCmd: f, FileList: f}).Serve()
	_ = ch.Close()
}

// A copy of which any step fails in the guest is an error that says which.
func TestCopyToAGuestThatFails(t *testing.T) {
	src := t.TempDir()
	write(t, src+"/tree/file", "content", 0o640)
	if err := os.Symlink("file", src+"/tree/link"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ fails, there, want string }{
		{"", "", ""},
		{"", "link", ""},
		{"Mkdir", "", "make directory new in the guest"},
		{"Open", "", "write new/file in the guest"},
		{"Write", "", "write new/file in the guest"},
		{"Close", "", "write new/file in the guest"},
		{"Setstat", "", "set the mode of new/file in the guest"},
		{"Symlink", "", "link new/link in the guest"},
		{"Remove", "link", "replace new/link in the guest"},
	} {
		err := serve(t, nil, failing{c.fails, c.there}.serve).dial(t).CopyTo(t.Context(), src+"/tree", "new", nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("CopyTo when %q fails = %v, want %q", c.fails, err, c.want)
		}
	}
}

// A file in the guest is not replaced by a directory of the same name.
func TestCopyToAGuestWithAFileInTheWay(t *testing.T) {
	src, home := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(src+"/tree/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, home+"/new/tree/sub", "theirs", 0o644)
	err := serve(t, nil, honest(home)).dial(t).CopyTo(t.Context(), src+"/tree", "new", nil)
	if err == nil || !strings.Contains(err.Error(), "make directory new/tree/sub in the guest") {
		t.Errorf("CopyTo over a file = %v, want \"make directory new/tree/sub in the guest\"", err)
	}
	if got, err := os.ReadFile(home + "/new/tree/sub"); err != nil || string(got) != "theirs" {
		t.Errorf("file in the guest = %q, %v, want \"theirs\"", got, err)
	}
}

// A file that cannot be read leaves nothing, and what is in the way stays.
func TestCopyFromAGuestThatFails(t *testing.T) {
	out := t.TempDir()
	c := serve(t, nil, failing{"Read", "file"}.serve).dial(t)
	if err := c.CopyFrom(t.Context(), "file", out, nil); err == nil || !strings.Contains(err.Error(), "read file in the guest") {
		t.Errorf("CopyFrom when reading fails = %v, want \"read file in the guest\"", err)
	}
	if err := c.CopyFrom(t.Context(), "file", out+"/no/such/", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CopyFrom to a missing directory = %v, want %v", err, fs.ErrNotExist)
	}
	if err := c.CopyFrom(t.Context(), "file", out+"/no/such", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CopyFrom below a missing directory = %v, want %v", err, fs.ErrNotExist)
	}
	if got := tree(t, out); got != "" {
		t.Errorf("files after a failed CopyFrom:\n%s\nwant none", got)
	}
	write(t, out+"/file/inner", "mine", 0o644)
	if err := c.CopyFrom(t.Context(), "file", out, nil); err == nil || !strings.Contains(err.Error(), "a directory of that name already exists") {
		t.Errorf("CopyFrom over a directory = %v, want \"a directory of that name already exists\"", err)
	}
}

// Without a directory a copy goes into the current one, and the guest's home directory
// has its own name.
func TestCopyFromNames(t *testing.T) {
	home, here := t.TempDir(), t.TempDir()
	write(t, home+"/file", "content", 0o644)
	c := serve(t, nil, honest(home)).dial(t)
	t.Chdir(here)
	if err := errors.Join(c.CopyFrom(t.Context(), "file", "new", nil), c.CopyFrom(t.Context(), "~", ".", nil)); err != nil {
		t.Fatal(err)
	}
	want := filepath.Base(home) + " drwxr-xr-x\n" + filepath.Base(home) + "/file -rw-r--r-- content\nnew -rw-r--r-- content\n"
	if got := tree(t, here); got != want {
		t.Errorf("copied:\n%swant\n%s", got, want)
	}
}
