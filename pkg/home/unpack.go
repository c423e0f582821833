package home

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

// BringOptions say how dotfiles come into a home directory.
type BringOptions struct {
	First bool // nobody was in there yet: they replace whatever is there

	// Shipped reports whether a file is as the provision scripts made it.
	Shipped func(name string, content []byte) bool
}

// recordName is the file in which a guest keeps which dotfiles it was brought.
// Whoever changes it decides about the files of their own home directory only.
const recordName = ".local/state/agent-sessionizer/dotfiles"

// maxRecord bounds it; the longest name has a kilobyte when it is quoted.
const maxRecord = 16 << 20

// Bring writes the archive of Dotfiles into home. What was changed in there since
// it was brought, or was removed, stays so, unless this is the first time.
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
	// Also what was brought before an error.
	return b.left.all(), errors.Join(err, b.writeRecord())
}

// bringing is one Bring.
type bringing struct {
	BringOptions
	target
	brought map[string]string // by name, how it was brought
}

func (b *bringing) entry(e Entry) error {
	if e.Mode.IsDir() {
		b.modes[e.Name] = e.Mode.Perm()
		if b.First {
			return b.told(e.Name, b.dirs(e.Name+"/."))
		}
		return nil // made when something comes into it: a removed one stays removed
	}
	want := sum(e.Mode, e.Content)
	if !b.First {
		if ok, err := b.mayReplace(e.Name, want); err != nil || !ok {
			return err
		}
	}
	if err := b.place(e); err != nil {
		return b.told(e.Name, err)
	}
	b.brought[e.Name] = want
	return nil
}

// mayReplace reports whether a file in the guest is still ours, or none was ever.
func (b *bringing) mayReplace(name, want string) (bool, error) {
	have, content, err := look(b.home, name)
	if err != nil {
		return false, err
	}
	last, known := b.brought[name]
	switch {
	case have == want: // also when we were cut off before this was written down
		b.brought[name] = want
		return false, nil
	case known:
		return have == last, nil
	case have == "":
		return true, nil
	}
	return content != nil && b.Shipped != nil && b.Shipped(name, content), nil
}

// RestoreOptions say which files come back.
type RestoreOptions struct {
	First    bool // nobody was in there yet; else only files that are not there come back
	Patterns Patterns
	Not      string
	Bounds   Bounds
}

// Restore writes the archive of Keep into home: the files that the patterns name,
// and no credentials. The archive is another guest's work.
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
			return t.left.all(), err
		}
		meant, _ := o.Patterns.match(e.Name)
		first, _, _ := strings.Cut(e.Name, "/")
		if !meant || !e.Mode.IsRegular() || first == o.Not || Credential(e.Name, e.Content) != "" {
			continue
		}
		if !o.First {
			if have, _, err := look(home, e.Name); err != nil || have != "" {
				continue //nolint:nilerr // what is there, in whatever state, stays
			}
		}
		if err := t.told(e.Name, t.place(e)); err != nil {
			return nil, err
		}
	}
}

// target is a home directory that files are written to.
type target struct {
	home  *os.Root
	force bool                   // links and files in the place of directories make way
	modes map[string]fs.FileMode // of directories to make
	left  leftOut
}

// errInTheWay is what a person has to decide about.
var errInTheWay = errors.New("something else is in its place")

// told notes what is in a file's way, or belongs to somebody else, and returns
// any other error.
func (t *target) told(name string, err error) error {
	if errors.Is(err, errInTheWay) || errors.Is(err, fs.ErrPermission) {
		t.left.add(Left{Name: name, Why: err.Error()})
		return nil
	}
	return err
}

// dirs makes the directories that lead to name. A link is not followed, not to
// inside of the home directory either: who looks at what was brought should find
// it where it was brought to.
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
		mode, ok := t.modes[dir]
		if !ok {
			mode = 0o700
		}
		if err := t.home.Mkdir(dir, mode|0o700); err != nil {
			return err
		}
		if err := t.home.Chmod(dir, mode|0o700); err != nil { // past the umask
			return err
		}
	}
	return nil
}

// place writes beside the name and renames: a link of that name is replaced, not
// followed, and nobody sees half a file.
func (t *target) place(e Entry) error {
	if err := t.dirs(e.Name); err != nil {
		return err
	}
	if info, err := t.home.Lstat(e.Name); err == nil && info.IsDir() {
		return errInTheWay
	}
	// Always the same for a name: what was cut off leaves nothing for long.
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

// look is how an entry of home is, as sum says it, and the content of a file; ""
// when there is none. What is neither file nor link is like nothing that is brought.
func look(home *os.Root, name string) (string, []byte, error) {
	for i := range len(name) { // no link of a directory is followed
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
			return "other", nil, nil //nolint:nilerr // it is not what we brought, or changes right now
		}
		return sum(info.Mode(), content), content, nil
	}
	return "other", nil, nil
}

// sum is short for a file or a link. A link's permissions mean nothing.
func sum(mode fs.FileMode, content []byte) string {
	h := sha256.Sum256(content)
	if mode&fs.ModeSymlink != 0 {
		return "link:" + hex.EncodeToString(h[:])
	}
	return fmt.Sprintf("%03o:%s", mode.Perm(), hex.EncodeToString(h[:]))
}

// Brought returns a function that reports whether a file of home is as Bring
// brought it.
func Brought(home *os.Root) func(name string, mode fs.FileMode, content []byte) bool {
	brought := readRecord(home)
	return func(name string, mode fs.FileMode, content []byte) bool {
		return brought[name] == sum(mode, content)
	}
}

// readRecord reads what was brought. What cannot be read was not: what is there
// then stays.
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
	if err := t.place(Entry{Name: recordName, Mode: 0o600, Content: text.Bytes()}); err != nil {
		return fmt.Errorf("note which dotfiles were brought: %w", err)
	}
	return nil
}
