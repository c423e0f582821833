package ssh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pkg/sftp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Bounds of one copy, whatever the guest sends.
const (
	copyDepth   = 64
	copyEntries = 200_000
	copyChunk   = 128 << 10
	copyStall   = time.Minute // without a byte from the guest
	listBudget  = 64 << 20    // bytes of one directory listing
	replyBudget = 1 << 20     // bytes of any other answer
	shownLeft   = 20          // left-out entries that Incomplete names
)

// Item is one file that was copied, or one entry that was left out.
type Item struct {
	Name    string // relative to the copied path, cleaned
	Size    int64
	LeftOut string // the reason, "" if it was copied
}

// Progress is called for each item when it is done. It may be nil.
type Progress func(Item)

// Incomplete reports that a copy succeeded except for entries that are never
// copied: links and device files from a guest, sockets, and .git directories of
// repositories.
type Incomplete struct {
	Count int
	Items []Item // the first few
}

func (e *Incomplete) Error() string {
	names := make([]string, len(e.Items))
	for i, it := range e.Items {
		names[i] = it.Name + " (" + it.LeftOut + ")"
	}
	if e.Count > len(names) {
		names = append(names, "…")
	}
	return fmt.Sprintf("left out %d: %s", e.Count, strings.Join(names, ", "))
}

// transfer is one copy in either direction.
type transfer struct {
	ctx      context.Context
	sftp     *sftp.Client
	answers  *budget
	progress Progress
	buf      []byte
	entries  int
	left     Incomplete
}

// transfer opens a separate connection and runs f over it. Closing that connection
// also ends any operation in which the guest's sftp server hangs.
func (c *Client) transfer(ctx context.Context, p Progress, f func(*transfer) error) (err error) {
	own, err := Dial(ctx, c.target)
	if err != nil {
		return err
	}
	defer own.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { _ = own.conn.Close() })
	defer stop()
	defer func() { // report why the connection was closed, not that it was
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	stall := time.AfterFunc(copyStall, func() {
		cancel(fmt.Errorf("%w: no data for %s", ErrUnreachable, copyStall))
	})
	defer stall.Stop()

	session, err := own.session()
	if err != nil {
		return own.connectionError(err)
	}
	in, err := session.StdinPipe()
	if err != nil {
		return err
	}
	out, err := session.StdoutPipe()
	if err != nil {
		return err
	}
	if err := session.RequestSubsystem("sftp"); err != nil {
		return fmt.Errorf("start a file transfer in the guest: %w", own.connectionError(err))
	}
	t := &transfer{ctx: ctx, progress: p, buf: make([]byte, copyChunk)}
	t.answers = &budget{r: out, heard: func() { stall.Reset(copyStall) }}
	t.answers.reset(replyBudget)
	// The library parses concurrent reads in its own goroutines, where a malformed
	// answer would cause a panic that cannot be recovered here.
	t.sftp, err = sftp.NewClientPipe(t.answers, in, sftp.UseConcurrentReads(false), sftp.MaxPacketUnchecked(copyChunk))
	if err != nil {
		return own.connectionError(err)
	}
	defer func() {
		_ = own.conn.Close()
		_ = t.sftp.Close() // waits for the library's reader
	}()
	defer func() {
		if p := recover(); p != nil {
			err = errors.New("the guest's sftp server sent a malformed answer")
		}
	}()
	if err := f(t); err != nil {
		return err
	}
	if t.left.Count > 0 {
		return &t.left
	}
	return nil
}

// step counts an entry, and fails if the copy was cancelled or exceeds its bounds.
func (t *transfer) step(depth int) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	if t.entries++; t.entries > copyEntries {
		return fmt.Errorf("more than %d files", copyEntries)
	}
	if depth > copyDepth {
		return fmt.Errorf("directories more than %d deep", copyDepth)
	}
	t.answers.reset(replyBudget)
	return nil
}

func (t *transfer) copied(name string, size int64) {
	if t.progress != nil {
		t.progress(Item{Name: termtext.Line(name), Size: size})
	}
}

func (t *transfer) leaveOut(name, why string) {
	it := Item{Name: brief(name), LeftOut: why}
	t.left.Count++
	if len(t.left.Items) < shownLeft {
		t.left.Items = append(t.left.Items, it)
	}
	if t.progress != nil {
		t.progress(it)
	}
}

// remoteError cleans the guest's part of an error.
func (t *transfer) remoteError(what, name string, err error) error {
	name = brief(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %s in the guest: %w", what, name, fs.ErrNotExist)
	case errors.Is(err, sftp.ErrSSHFxConnectionLost), errors.Is(err, io.ErrUnexpectedEOF):
		if t.answers.isSpent() {
			return fmt.Errorf("%s %s in the guest: the guest sent too much data", what, name)
		}
		return fmt.Errorf("%s %s in the guest: %w: the connection was lost", what, name, ErrUnreachable)
	}
	return fmt.Errorf("%s %s in the guest: %s", what, name, brief(err.Error()))
}

// remotePath converts the path that a user writes after "SESSION:".
func remotePath(p string) string {
	if p == "~" || p == "" {
		return "."
	}
	rest, ok := strings.CutPrefix(p, "~/")
	switch {
	case !ok:
		return p
	case rest == "":
		return "."
	}
	return rest
}

// CopyTo copies a file or a directory into the guest. As with cp, if remote is a
// directory, the copy goes into it under its own name. CopyTo recreates links
// inside a directory instead of following them. It refuses a local path that is
// itself a link.
func (c *Client) CopyTo(ctx context.Context, local, remote string, p Progress) error {
	abs, err := filepath.Abs(local)
	if err != nil {
		return fmt.Errorf("copy %s: %w", local, err)
	}
	st, err := os.Lstat(abs)
	if err != nil {
		return fmt.Errorf("copy %s: %w", local, err)
	}
	if why := oddKind(st.Mode()); why != "" {
		return fmt.Errorf("copy %s: it is a %s", local, why)
	}
	return c.transfer(ctx, p, func(t *transfer) error {
		remote := remotePath(remote)
		dst, err := t.sftp.Stat(remote)
		switch {
		case err == nil && dst.IsDir():
			remote = path.Join(remote, filepath.Base(abs))
		case err == nil && st.IsDir():
			return fmt.Errorf("copy %s: %s is a file in the guest", local, brief(remote))
		case err != nil && (!errors.Is(err, fs.ErrNotExist) || strings.HasSuffix(remote, "/")):
			return t.remoteError("find", remote, err)
		}
		root, err := os.OpenRoot(filepath.Dir(abs))
		if err != nil {
			return fmt.Errorf("copy %s: %w", local, err)
		}
		defer root.Close()
		return t.upload(root, filepath.Base(abs), remote, filepath.Base(abs), 0)
	})
}

// upload copies the entry name of dir to remote; shown is its display name.
func (t *transfer) upload(dir *os.Root, name, remote, shown string, depth int) error {
	if err := t.step(depth); err != nil {
		return err
	}
	st, err := dir.Lstat(name)
	if err != nil {
		return fmt.Errorf("copy %s: %w", shown, err)
	}
	switch {
	case st.IsDir():
		return t.uploadDir(dir, name, remote, shown, st.Mode(), depth)
	case st.Mode().IsRegular():
		return t.uploadFile(dir, name, remote, shown, st)
	case st.Mode()&fs.ModeSymlink != 0:
		return t.uploadLink(dir, name, remote, shown)
	}
	t.leaveOut(shown, oddKind(st.Mode()))
	return nil
}

func (t *transfer) uploadDir(dir *os.Root, name, remote, shown string, mode fs.FileMode, depth int) error {
	if err := t.sftp.Mkdir(remote); err != nil {
		if st, statErr := t.sftp.Stat(remote); statErr != nil || !st.IsDir() {
			return t.remoteError("make directory", remote, err)
		}
	}
	sub, err := dir.OpenRoot(name)
	if err != nil {
		return fmt.Errorf("copy %s: %w", shown, err)
	}
	defer sub.Close()
	entries, err := fs.ReadDir(sub.FS(), ".")
	if err != nil {
		return fmt.Errorf("copy %s: %w", shown, err)
	}
	for _, e := range entries {
		if err := t.upload(sub, e.Name(), path.Join(remote, e.Name()), path.Join(shown, e.Name()), depth+1); err != nil {
			return err
		}
	}
	// Set the mode last, because it may make the directory read-only.
	if err := t.sftp.Chmod(remote, mode.Perm()); err != nil {
		return t.remoteError("set the mode of", remote, err)
	}
	return nil
}

// uploadFile copies the file described by st. It refuses a link that has replaced
// the file, because a Root follows links to targets inside it.
func (t *transfer) uploadFile(dir *os.Root, name, remote, shown string, st fs.FileInfo) (err error) {
	src, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("copy %s: %w", shown, err)
	}
	defer src.Close()
	if opened, err := src.Stat(); err != nil || !os.SameFile(opened, st) {
		return fmt.Errorf("copy %s: %w", shown, cmp.Or(err, errReplaced))
	}
	dst, err := t.sftp.OpenFile(remote, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return t.remoteError("write", remote, err)
	}
	defer func() {
		if closeErr := dst.Close(); err == nil && closeErr != nil {
			err = t.remoteError("write", remote, closeErr)
		}
	}()
	var size int64
	for {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		n, readErr := src.Read(t.buf)
		if n > 0 {
			t.answers.reset(replyBudget)
			if _, err := dst.Write(t.buf[:n]); err != nil {
				return t.remoteError("write", remote, err)
			}
			size += int64(n)
		}
		if errors.Is(readErr, io.EOF) {
			break
		}
		if readErr != nil {
			return fmt.Errorf("copy %s: %w", shown, readErr)
		}
	}
	if err := t.sftp.Chmod(remote, st.Mode().Perm()); err != nil {
		return t.remoteError("set the mode of", remote, err)
	}
	t.copied(shown, size)
	return nil
}

var errReplaced = errors.New("it was replaced during the copy")

func (t *transfer) uploadLink(dir *os.Root, name, remote, shown string) error {
	target, err := dir.Readlink(name)
	if err != nil {
		return fmt.Errorf("copy %s: %w", shown, err)
	}
	if st, err := t.sftp.Lstat(remote); err == nil && !st.IsDir() {
		if err := t.sftp.Remove(remote); err != nil {
			return t.remoteError("replace", remote, err)
		}
	}
	if err := t.sftp.Symlink(target, remote); err != nil {
		return t.remoteError("link", remote, err)
	}
	t.copied(shown, 0)
	return nil
}

// oddKind names the type of an entry that is neither a file nor a directory. It
// returns "" for those two.
func oddKind(m fs.FileMode) string {
	switch {
	case m.IsRegular(), m.IsDir():
		return ""
	case m&fs.ModeSymlink != 0:
		return "symbolic link"
	case m&fs.ModeNamedPipe != 0:
		return "named pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	case m&fs.ModeDevice != 0:
		return "device file"
	}
	return "file of unknown kind"
}
