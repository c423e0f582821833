package homearchive

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Left is a file that was left out, and why.
type Left struct {
	Name       string // "" for several files
	Why        string
	Credential bool // the file may be given to a session as a secret instead
}

func (l Left) String() string {
	if l.Name == "" {
		return l.Why
	}
	return l.Name + ": " + l.Why
}

// manyLeft is how many left-out files are listed individually.
const manyLeft = 20

// leftOut collects left-out files.
type leftOut struct {
	some []Left
	more int
}

func (o *leftOut) add(l Left) {
	if len(o.some) == manyLeft {
		o.more++
		return
	}
	o.some = append(o.some, l)
}

func (o *leftOut) list() []Left {
	if o.more > 0 {
		return append(o.some, Left{Why: fmt.Sprintf("and %d more", o.more)})
	}
	return o.some
}

// DotfileBounds returns the bounds of the user's dotfiles.
func DotfileBounds() Bounds { return Bounds{Entries: 10_000, File: 4 << 20, Total: 32 << 20} }

// Dotfiles writes an archive of everything in dir except repositories' .git
// directories. It archives links as links if they point to targets inside dir. It
// leaves out links that point elsewhere, special files, the entry not, where the guest
// has something else, and files that look like credentials. Exceeding the bounds is an
// error.
func Dotfiles(w io.Writer, dir *os.Root, not string) ([]Left, error) {
	bounds := DotfileBounds()
	out, err := newWriter(w, bounds)
	if err != nil {
		return nil, err
	}
	var left leftOut
	err = walk(dir, "", func(name string, info fs.FileInfo, err error) error {
		if err != nil {
			return err
		}
		e := Entry{Name: name, Mode: info.Mode().Type() | info.Mode().Perm(), Time: info.ModTime()}
		switch {
		case path.Base(name) == ".git":
			return fs.SkipDir
		case name == not:
			left.add(Left{Name: name, Why: "is the location of the repository"})
			return fs.SkipDir
		case info.Mode()&fs.ModeSymlink != 0:
			target, ok, err := resolveLink(dir, name)
			if err != nil {
				return err
			}
			if !ok {
				left.add(Left{Name: name, Why: fmt.Sprintf("is a link to %q, which is not one of the dotfiles", target)})
				return nil
			}
			e.Content, e.Mode = []byte(target), fs.ModeSymlink|0o777
		case info.Mode().IsRegular():
			if info.Size() > bounds.File {
				return tooLarge(name, bounds.File)
			}
			content, err := read(dir, name, bounds.File)
			if err != nil {
				return err
			}
			e.Content = content
		case !info.IsDir():
			left.add(Left{Name: name, Why: "is not a file, directory or link"})
			return nil
		}
		if !info.IsDir() {
			why := Credential(name, e.Content)
			if why == "" && Token(e.Content) {
				why = "contains a token"
			}
			if why != "" {
				left.add(Left{Name: name, Why: why, Credential: true})
				return nil
			}
		}
		if !out.fits(name, int64(len(e.Content))) {
			return fmt.Errorf("%q exceeds the limit of %d files or %d MiB in total", name, bounds.Entries, bounds.Total>>20)
		}
		return out.add(e)
	})
	if err != nil {
		return nil, err
	}
	return left.list(), out.close()
}

// resolveLink returns the target of a link, and whether the link can be copied: its target
// must be relative and inside dir. The target is cleaned, so that its ".." elements
// start from the link itself and not from the target of another link.
func resolveLink(dir *os.Root, name string) (target string, ok bool, err error) {
	if target, err = dir.Readlink(name); err != nil {
		return "", false, err
	}
	target = path.Clean(target)
	to := path.Join(path.Dir(name), target)
	return target, !path.IsAbs(target) && to != ".." && !strings.HasPrefix(to, "../"), nil
}

// SaveOptions defines which files of a home directory are saved.
type SaveOptions struct {
	Patterns Patterns
	Not      string // an entry of the home directory to leave out: the checkout
	Bounds   Bounds

	// Ours reports whether a file is unchanged since it was brought into the guest.
	// Such a file will be brought again.
	Ours func(name string, mode fs.FileMode, content []byte) bool
}

// SaveBounds returns the bounds of a saved home of total bytes.
func SaveBounds(total int64) Bounds { return Bounds{Entries: 20_000, File: 64 << 20, Total: total} }

// manyFiles is how many files are considered when the newest are selected.
const manyFiles = 200_000

// Save writes an archive of the files that the patterns match, newest first, as far as
// the bounds allow. It saves no links and no credentials.
func Save(w io.Writer, home *os.Root, o SaveOptions) ([]Left, error) {
	out, err := newWriter(w, o.Bounds)
	if err != nil {
		return nil, err
	}
	type file struct {
		name string
		info fs.FileInfo
	}
	var files []file
	err = walk(home, "", func(name string, info fs.FileInfo, err error) error {
		if err != nil {
			if name == "" {
				return err
			}
			return nil // a file that the agent cannot read is not one of its files
		}
		meant, below := o.Patterns.match(name)
		switch {
		case name == o.Not, !below:
			return fs.SkipDir
		case meant && info.Mode().IsRegular():
			files = append(files, file{name, info})
		}
		if len(files) > manyFiles {
			return fmt.Errorf("more than %d files", manyFiles)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(files, func(a, b file) int {
		return cmp.Or(b.info.ModTime().Compare(a.info.ModTime()), cmp.Compare(a.name, b.name))
	})
	var left leftOut
	old := 0
	for _, f := range files {
		if f.info.Size() > o.Bounds.File {
			left.add(Left{Name: f.name, Why: fmt.Sprintf("larger than %d MiB", o.Bounds.File>>20)})
			continue
		}
		if !out.fits(f.name, f.info.Size()) {
			old++
			continue
		}
		content, err := read(home, f.name, o.Bounds.File)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			left.add(Left{Name: f.name, Why: err.Error()})
			continue
		case !out.fits(f.name, int64(len(content))): // the file grew
			old++
			continue
		}
		mode := f.info.Mode().Perm()
		if why := Credential(f.name, content); why != "" {
			left.add(Left{Name: f.name, Why: why, Credential: true})
			continue
		}
		if o.Ours != nil && o.Ours(f.name, mode, content) {
			continue
		}
		if err := out.add(Entry{Name: f.name, Mode: mode, Time: f.info.ModTime(), Content: content}); err != nil {
			return nil, err
		}
	}
	if old > 0 {
		left.add(Left{Why: fmt.Sprintf("%d older files: they would exceed the total of %d MiB", old, o.Bounds.Total>>20)})
	}
	return left.list(), out.close()
}

func tooLarge(name string, most int64) error {
	return fmt.Errorf("%q is larger than %d MiB", name, most>>20)
}

// walk calls visit for everything below dir, in order. As with fs.WalkDir, fs.SkipDir
// skips the content of a directory, and a directory that cannot be listed is visited a
// second time, with the error. It accepts names that are not UTF-8, which an fs.FS does
// not.
func walk(root *os.Root, dir string, visit func(name string, info fs.FileInfo, err error) error) error {
	names, err := list(root, cmp.Or(dir, "."))
	if err != nil {
		return visit(dir, nil, err)
	}
	for _, name := range names {
		if dir != "" {
			name = dir + "/" + name
		}
		info, err := root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
		if err = visit(name, info, nil); err == nil && info.IsDir() {
			err = walk(root, name, visit)
		}
		if err != nil && !errors.Is(err, fs.SkipDir) {
			return err
		}
	}
	return nil
}

func list(root *os.Root, dir string) ([]string, error) {
	f, err := root.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// read returns a file's content. It does not block if a pipe has replaced the file.
func read(root *os.Root, name string, most int64) ([]byte, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, cmp.Or(err, errNoFile)
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = tooLarge(name, most)
	}
	return b, err
}

var errNoFile = errors.New("no longer a file")
