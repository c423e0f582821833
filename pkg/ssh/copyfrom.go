package ssh

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	growth   = 16 << 20  // how much a file may grow while it is copied
	diskKept = 256 << 20 // free space that a copy leaves on the host's disk
)

// CopyFrom copies a file or a directory out of the guest. As with cp, if local is a
// directory, the copy goes into it under its own name.
//
// The guest controls only names below local and contents. CopyFrom checks the
// names, never writes through a link, and removes setuid, group and other write
// permission from modes. It leaves out links, device files and .git directories,
// whose hooks and settings git would use, and reports them as Incomplete.
func (c *Client) CopyFrom(ctx context.Context, remote, local string, p Progress) error {
	return c.transfer(ctx, p, func(t *transfer) error {
		remote := remotePath(remote)
		st, err := t.sftp.Stat(remote)
		if err != nil {
			return t.remoteError("find", remote, err)
		}
		if why := oddKind(st.Mode()); why != "" {
			return fmt.Errorf("copy %s from the guest: it is a %s", brief(remote), why)
		}
		parent, name := filepath.Split(filepath.Clean(local))
		if here, err := os.Stat(local); err == nil && here.IsDir() {
			parent = local
			if name, err = t.baseName(remote); err != nil {
				return err
			}
		} else if strings.HasSuffix(local, string(filepath.Separator)) {
			return fmt.Errorf("copy to %s: %w", local, fs.ErrNotExist)
		}
		if parent == "" {
			parent = "."
		}
		dir, err := os.OpenRoot(parent)
		if err != nil {
			return fmt.Errorf("copy to %s: %w", local, err)
		}
		defer dir.Close()
		return t.download(dir, name, remote, name, st, 0)
	})
}

// baseName returns the name under which remote goes into a directory.
func (t *transfer) baseName(remote string) (string, error) {
	name := path.Base(path.Clean(remote))
	if name == "." || name == ".." {
		real, err := t.sftp.RealPath(remote)
		if err != nil {
			return "", t.remoteError("find", remote, err)
		}
		name = path.Base(path.Clean(real))
	}
	if why := badName(name); why != "" {
		return "", fmt.Errorf("copy %s from the guest: %s", brief(remote), why)
	}
	return name, nil
}

// badName returns why a name from the guest cannot be used on the host, or "".
func badName(name string) string {
	switch {
	case name == "", name == ".", name == "..", len(name) > 255,
		strings.ContainsAny(name, "/\\"), !utf8.ValidString(name):
		return "invalid file name"
	}
	if strings.ContainsFunc(name, func(r rune) bool {
		return unicode.IsControl(r) || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
	}) {
		return "name has unprintable characters"
	}
	// Compare as a file system would that folds case and ignores invisible
	// characters, such as those of macOS.
	visible := strings.Map(func(r rune) rune {
		if unicode.Is(unicode.Cf, r) {
			return -1
		}
		return r
	}, name)
	if strings.EqualFold(visible, ".git") {
		return "repository data, which fetch transfers"
	}
	return ""
}

// download copies remote to the entry name of dir. The name has been checked.
func (t *transfer) download(dir *os.Root, name, remote, shown string, st fs.FileInfo, depth int) error {
	if err := t.step(depth); err != nil {
		return err
	}
	switch {
	case st.IsDir():
		return t.downloadDir(dir, name, remote, shown, st.Mode(), depth)
	case st.Mode().IsRegular():
		return t.downloadFile(dir, name, remote, shown, st)
	}
	t.leaveOut(shown, oddKind(st.Mode()))
	return nil
}

func (t *transfer) downloadDir(dir *os.Root, name, remote, shown string, mode fs.FileMode, depth int) error {
	here, err := dir.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = dir.Mkdir(name, 0o700|mode.Perm()&0o755)
	case err == nil && !here.IsDir():
		err = errors.New("a file or link of that name already exists")
	}
	if err != nil {
		return fmt.Errorf("copy to %s: %w", termtext.Line(shown), err)
	}
	sub, err := dir.OpenRoot(name)
	if err != nil {
		return fmt.Errorf("copy to %s: %w", termtext.Line(shown), err)
	}
	defer sub.Close()
	t.answers.reset(listBudget)
	entries, err := t.sftp.ReadDirContext(t.ctx, remote)
	if err != nil {
		return t.remoteError("list", remote, err)
	}
	for _, e := range entries {
		inner := path.Join(shown, e.Name())
		if why := badName(e.Name()); why != "" {
			if err := t.step(depth); err != nil {
				return err
			}
			t.leaveOut(inner, why)
			continue
		}
		if err := t.download(sub, e.Name(), path.Join(remote, e.Name()), inner, e, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// downloadFile writes to a temporary file and renames it. It therefore replaces a
// link of that name instead of following it, and an interrupted copy keeps the old
// file.
func (t *transfer) downloadFile(dir *os.Root, name, remote, shown string, st fs.FileInfo) (err error) {
	if err := checkFreeSpace(dir, st.Size()); err != nil {
		return fmt.Errorf("copy to %s: %w", termtext.Line(shown), err)
	}
	if here, err := dir.Lstat(name); err == nil && here.IsDir() {
		return fmt.Errorf("copy to %s: a directory of that name already exists", termtext.Line(shown))
	}
	src, err := t.sftp.Open(remote)
	if err != nil {
		return t.remoteError("read", remote, err)
	}
	defer src.Close() // opened for reading only
	part := ".copy-" + rand.Text()
	dst, err := dir.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("copy to %s: %w", termtext.Line(shown), err)
	}
	done := false
	defer func() { // also runs after a panic in the library's parser
		if !done {
			_ = dst.Close()
			_ = dir.Remove(part)
		}
	}()
	size, err := t.receive(dst, src, remote, st.Size()+growth)
	if err != nil {
		return err
	}
	if err := errors.Join(dst.Chmod(0o600|st.Mode().Perm()&0o755), dst.Close(), dir.Rename(part, name)); err != nil {
		return fmt.Errorf("copy to %s: %w", termtext.Line(shown), err)
	}
	done = true
	t.copied(shown, size)
	return nil
}

// receive copies the open file src to dst, at most limit bytes.
func (t *transfer) receive(dst io.Writer, src io.Reader, remote string, limit int64) (int64, error) {
	var size int64
	for {
		if err := t.ctx.Err(); err != nil {
			return size, err
		}
		t.answers.reset(replyBudget)
		n, err := src.Read(t.buf)
		if size += int64(n); size > limit {
			return size, fmt.Errorf("read %s in the guest: it keeps growing", brief(remote))
		}
		if _, err := dst.Write(t.buf[:n]); err != nil {
			return size, err
		}
		if errors.Is(err, io.EOF) {
			return size, nil
		}
		if err != nil {
			return size, t.remoteError("read", remote, err)
		}
	}
}

// checkFreeSpace rejects a file that would fill the host's disk.
func checkFreeSpace(dir *os.Root, size int64) error {
	d, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.Fd()), &st); err != nil {
		return fmt.Errorf("read the free disk space: %w", err)
	}
	return fits(size, st.Bavail*uint64(st.Bsize))
}

// fits fails if the file would leave less than diskKept bytes free.
func fits(size int64, free uint64) error {
	if size < 0 || free < diskKept || uint64(size) > free-diskKept {
		return fmt.Errorf("no space: the file has %d bytes, %d are free, and %d must stay free", size, free, int64(diskKept))
	}
	return nil
}
