package homearchive

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// BringOptions defines how dotfiles are brought into a home directory.
type BringOptions struct {
	First bool // the home directory is unused: dotfiles replace existing files

	// Shipped reports whether a file is still as the provision scripts created it.
	Shipped func(name string, content []byte) bool
}

// recordName is the file in which a guest records which dotfiles it received. A user
// who changes the file affects only their own home directory.
const recordName = ".local/state/agent-sessionizer/dotfiles"

// maxRecord limits the size of the record; the longest name takes a kilobyte when
// quoted.
const maxRecord = 16 << 20

// Bring unpacks an archive of Dotfiles into home. Unless o.First is set, files that
// were changed or removed in the guest since they were brought stay that way.
func Bring(home *os.Root, archive io.Reader, o BringOptions) ([]Left, error) {
	in, err := newReader(archive, DotfileBounds())
	if err != nil {
		return nil, err
	}
	b := bringing{BringOptions: o, target: target{home: home, force: o.First, modes: map[string]fs.FileMode{}}, brought: readRecord(home)}
	for {
		var e Entry
		if e, err = in.next(); err != nil {
			break
		}
		if err = b.entry(e); err != nil {
			break
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	// Also record what was brought before an error.
	return b.left.list(), errors.Join(err, b.writeRecord())
}

// bringing is the state of one call of Bring.
type bringing struct {
	BringOptions
	target
	brought map[string]string // sum of each brought file, by name
}

func (b *bringing) entry(e Entry) error {
	if e.Mode.IsDir() {
		b.modes[e.Name] = e.Mode.Perm()
		if b.First {
			return b.skipObstructed(e.Name, b.dirs(e.Name+"/."))
		}
		return nil // created when a file is placed in it, so a removed directory stays removed
	}
	want := sum(e.Mode, e.Content)
	if !b.First {
		if ok, err := b.mayReplace(e.Name, want); err != nil || !ok {
			return err
		}
	}
	if err := b.writeEntry(e); err != nil {
		return b.skipObstructed(e.Name, err)
	}
	b.brought[e.Name] = want
	return nil
}

// mayReplace reports whether a file may be written: the guest still has it as it was
// brought or shipped, or never had it.
func (b *bringing) mayReplace(name, want string) (bool, error) {
	have, content, err := readExisting(b.home, name)
	if err != nil {
		return false, err
	}
	last, known := b.brought[name]
	switch {
	case have == want: // also if an earlier run was interrupted before it recorded this
		b.brought[name] = want
		return false, nil
	case known:
		return have == last, nil
	case have == "":
		return true, nil
	}
	return content != nil && b.Shipped != nil && b.Shipped(name, content), nil
}

// RestoreOptions defines which files are restored.
type RestoreOptions struct {
	First    bool // the home directory is unused; otherwise only missing files are restored
	Patterns Patterns
	Not      string
	Bounds   Bounds
}

// Restore unpacks an archive of Save into home: only files that match the patterns, and
// no credentials. Another guest made the archive.
func Restore(home *os.Root, archive io.Reader, o RestoreOptions) ([]Left, error) {
	in, err := newReader(archive, o.Bounds)
	if err != nil {
		return nil, err
	}
	t := target{home: home, force: o.First, modes: map[string]fs.FileMode{}}
	for {
		e, err := in.next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return t.left.list(), err
		}
		meant, _ := o.Patterns.match(e.Name)
		first, _, _ := strings.Cut(e.Name, "/")
		if !meant || !e.Mode.IsRegular() || first == o.Not || Credential(e.Name, e.Content) != "" {
			continue
		}
		if !o.First {
			if have, _, err := readExisting(home, e.Name); err != nil || have != "" {
				continue //nolint:nilerr // an existing entry, in any state, stays
			}
		}
		if err := t.skipObstructed(e.Name, t.writeEntry(e)); err != nil {
			return nil, err
		}
	}
}

// target is a home directory that files are written to.
type target struct {
	home  *os.Root
	force bool                   // replace links and files that are in the place of directories
	modes map[string]fs.FileMode // of directories to create
	left  leftOut
}

// errInTheWay reports a conflict that a person has to resolve.
var errInTheWay = errors.New("a different file is in its place")

// skipObstructed records a file that was not written because something is in its way or belongs
// to another user. It returns any other error.
func (t *target) skipObstructed(name string, err error) error {
	if errors.Is(err, errInTheWay) || errors.Is(err, fs.ErrPermission) {
		t.left.add(Left{Name: name, Why: err.Error()})
		return nil
	}
	return err
}

// dirs creates the parent directories of name. It follows no links, not even to targets
// inside the home directory: a user should find the files where they were brought to.
func (t *target) dirs(name string) error {
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		dir := name[:i]
		info, err := t.home.Lstat(dir)
		if err == nil && info.IsDir() {
			continue
		}
		if err == nil {
			if !t.force {
				return errInTheWay
			}
			err = t.home.Remove(dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		mode := t.modes[dir] | 0o700
		if err := t.home.Mkdir(dir, mode); err != nil {
			return err
		}
		if err := t.home.Chmod(dir, mode); err != nil { // override the umask
			return err
		}
	}
	return nil
}

// writeEntry writes a temporary file beside the target and renames it. It replaces a link of
// that name instead of following it, and no one sees a partial file.
func (t *target) writeEntry(e Entry) error {
	if err := t.dirs(e.Name); err != nil {
		return err
	}
	if info, err := t.home.Lstat(e.Name); err == nil && info.IsDir() {
		return errInTheWay
	}
	// The temporary name depends only on the target's name, so the next run replaces
	// the leftover of an interrupted one.
	unique := sha256.Sum256([]byte(e.Name))
	part := path.Join(path.Dir(e.Name), ".brought-"+hex.EncodeToString(unique[:8]))
	if err := t.home.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := t.write(part, e)
	if err == nil {
		err = t.home.Rename(part, e.Name)
	}
	if err != nil {
		_ = t.home.Remove(part)
	}
	return err
}

func (t *target) write(name string, e Entry) error {
	if e.Mode&fs.ModeSymlink != 0 {
		return t.home.Symlink(string(e.Content), name)
	}
	f, err := t.home.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(e.Content)
	return errors.Join(err, f.Chmod(e.Mode.Perm()), f.Close(), t.home.Chtimes(name, time.Time{}, e.Time))
}

// readExisting returns the state of an entry of home in the form of sum, and the content if it
// is a file. The state is "" if the entry does not exist. Special files have a state
// that equals no brought file.
func readExisting(home *os.Root, name string) (string, []byte, error) {
	for i := range len(name) { // follow no links to directories
		if name[i] != '/' {
			continue
		}
		if info, err := home.Lstat(name[:i]); errors.Is(err, fs.ErrNotExist) {
			return "", nil, nil
		} else if err != nil || !info.IsDir() {
			return "other", nil, err
		}
	}
	info, err := home.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil, nil
	case err != nil:
		return "", nil, err
	case info.Mode()&fs.ModeSymlink != 0:
		to, err := home.Readlink(name)
		return sum(info.Mode(), []byte(to)), nil, err
	case info.Mode().IsRegular() && info.Size() <= DotfileBounds().File:
		content, err := read(home, name, DotfileBounds().File)
		if err != nil {
			return "other", nil, nil //nolint:nilerr // it differs from what was brought, or is changing right now
		}
		return sum(info.Mode(), content), content, nil
	}
	return "other", nil, nil
}

// sum returns a short digest of a file or a link. The permissions of a link do not
// count.
func sum(mode fs.FileMode, content []byte) string {
	h := sha256.Sum256(content)
	if mode&fs.ModeSymlink != 0 {
		return "link:" + hex.EncodeToString(h[:])
	}
	return fmt.Sprintf("%03o:%s", mode.Perm(), hex.EncodeToString(h[:]))
}

// Brought returns a function that reports whether a file of home is unchanged since
// Bring brought it.
func Brought(home *os.Root) func(name string, mode fs.FileMode, content []byte) bool {
	brought := readRecord(home)
	return func(name string, mode fs.FileMode, content []byte) bool {
		return brought[name] == sum(mode, content)
	}
}

// readRecord reads the record of brought files. If it cannot be read, no file counts as
// brought, and existing files stay.
func readRecord(home *os.Root) map[string]string {
	brought := map[string]string{}
	text, err := read(home, recordName, maxRecord)
	if err != nil {
		return brought
	}
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		how, quoted, _ := strings.Cut(s.Text(), " ")
		if name, err := strconv.Unquote(quoted); err == nil && validName(name) {
			brought[name] = how
		}
	}
	return brought
}

func (b *bringing) writeRecord() error {
	var text bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(b.brought)) {
		fmt.Fprintf(&text, "%s %s\n", b.brought[name], strconv.Quote(name))
	}
	t := target{home: b.home, force: b.First}
	if err := t.writeEntry(Entry{Name: recordName, Mode: 0o600, Content: text.Bytes()}); err != nil {
		return fmt.Errorf("record which dotfiles were copied: %w", err)
	}
	return nil
}
