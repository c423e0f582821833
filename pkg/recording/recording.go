// Package recording owns the recordings of terminals: it writes what a guest's tmux windows and a
// task's agent print, and lists, reads, searches and removes what was written.
//
// A recording is a series of parts. Each part is an asciicast v2 file that plays alone, and beside it
// is a file with its text, for the search. Everything recorded comes from a guest, which is hostile:
// only text and sequences that display something are written, without the secrets that the host knows,
// and within bounds.
//
// It never connects to a guest, and never decides what is recorded.
package recording

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Recording is one recorded terminal.
type Recording struct {
	ID      string    `json:"id" example:"3f2a9c1b7d4e-2" doc:"The id of the session or task, and the number of the terminal in it."`
	Subject string    `json:"subject" doc:"The id of the session or task."`
	Title   string    `json:"title" doc:"The name of the window, as the guest reported it last."`
	Began   time.Time `json:"began"`
	Ended   time.Time `json:"ended" doc:"When something was recorded last."`
	Width   int       `json:"width" doc:"Of the terminal at the end, in characters."`
	Height  int       `json:"height"`
	Size    int64     `json:"size" doc:"Bytes on the host's disk."`
	Parts   int       `json:"parts" doc:"Number of files. The oldest ones are removed when a session or task has too much."`

	parts []part
}

// Store is the directory of all recordings of a host.
type Store struct{ Dir string }

// Subject returns the directory of the recordings of a session or task.
func (s Store) Subject(id string) string { return filepath.Join(s.Dir, id) }

const (
	castExt = ".cast"
	textExt = ".txt"
)

var (
	idPattern   = lazyregexp.New(`^([0-9a-f]{12})-([0-9]{1,9})$`)
	partPattern = lazyregexp.New(`^([0-9]{1,9})-([0-9]{1,9})\.cast$`)
)

// part is one file of a recording, with its text beside it.
type part struct {
	dir            string
	number, serial int // of the terminal, and of the part in it
	changed        time.Time
	size           int64
}

func (p part) base() string { return filepath.Join(p.dir, fmt.Sprintf("%d-%d", p.number, p.serial)) }
func (p part) cast() string { return p.base() + castExt }
func (p part) text() string { return p.base() + textExt }

// remove removes the part. A missing one is a success.
func (p part) remove() error {
	for _, name := range []string{p.text(), p.cast()} { // the name that listParts looks for is the last to go
		crash.Here(crash.BeforeFile)
		err := os.Remove(name)
		crash.Here(crash.AfterFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail.New(fail.Host, "remove recording: %w", err)
		}
	}
	return nil
}

// listParts returns the parts in the directory of a session or task, the oldest of each terminal first.
func listParts(dir string) (parts []part, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fail.New(fail.Host, "list recordings: %w", err)
	}
	for _, e := range entries {
		m := partPattern.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		p := part{dir: dir}
		p.number, _ = strconv.Atoi(m[1]) // the pattern allows only numbers
		p.serial, _ = strconv.Atoi(m[2])
		st, err := os.Lstat(p.cast())
		if err != nil || !st.Mode().IsRegular() {
			continue // removed meanwhile
		}
		p.changed, p.size = st.ModTime(), st.Size()
		if st, err := os.Lstat(p.text()); err == nil {
			p.size += st.Size()
		}
		parts = append(parts, p)
	}
	slices.SortFunc(parts, func(a, b part) int { return cmp.Or(a.number-b.number, a.serial-b.serial) })
	return parts, nil
}

// List returns all recordings, or those of one session or task, the last changed first.
func (s Store) List(subject string) (all []Recording, err error) {
	subjects := []string{subject}
	if subject == "" {
		if subjects, err = s.subjects(); err != nil {
			return nil, err
		}
	}
	for _, id := range subjects {
		if !ids.Valid(id) {
			continue
		}
		parts, err := listParts(s.Subject(id))
		if err != nil {
			return nil, err
		}
		for len(parts) > 0 {
			n := 1
			for n < len(parts) && parts[n].number == parts[0].number {
				n++
			}
			if r, ok := describe(id, parts[:n]); ok {
				all = append(all, r)
			}
			parts = parts[n:]
		}
	}
	slices.SortStableFunc(all, func(a, b Recording) int { return b.Ended.Compare(a.Ended) })
	return all, nil
}

// subjects returns the ids of the sessions and tasks that have recordings.
func (s Store) subjects() (all []string, err error) {
	entries, err := os.ReadDir(s.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fail.New(fail.Host, "list recordings: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() && ids.Valid(e.Name()) {
			all = append(all, e.Name())
		}
	}
	return all, nil
}

// describe returns the recording that has these parts. It reports false if none can be read.
func describe(subject string, parts []part) (r Recording, ok bool) {
	r = Recording{ID: fmt.Sprintf("%s-%d", subject, parts[0].number), Subject: subject}
	for _, p := range parts {
		h, err := p.header()
		if err != nil {
			continue // removed meanwhile, or its writer was killed before the first line was complete
		}
		if !ok {
			r.Began, ok = time.Unix(h.Timestamp, 0).UTC(), true
		}
		r.Title, r.Width, r.Height, r.Ended = h.Title, h.Width, h.Height, p.changed.UTC()
		r.Size += p.size
		r.parts = append(r.parts, p)
	}
	r.Parts = len(r.parts)
	return r, ok
}

// Get returns the recording with that id.
func (s Store) Get(id string) (Recording, error) {
	if m := idPattern.FindStringSubmatch(id); m != nil {
		all, err := s.List(m[1])
		if err != nil {
			return Recording{}, err
		}
		if i := slices.IndexFunc(all, func(r Recording) bool { return r.ID == id }); i >= 0 {
			return all[i], nil
		}
	}
	return Recording{}, fail.New(fail.NotFound, "no recording %.40q", id).WithHint("agent-sessionizer recordings list")
}

// Remove removes a recording, or with the id of a session or task all of its recordings. A terminal
// that is being recorded begins a new part at its next output.
func (s Store) Remove(id string) (removed int64, err error) {
	if ids.Valid(id) {
		parts, err := listParts(s.Subject(id))
		if err != nil {
			return 0, err
		}
		if len(parts) == 0 && os.Remove(s.Subject(id)) != nil { // a killed process may have left it empty
			return 0, fail.New(fail.NotFound, "session or task %s has no recordings", id).WithHint("agent-sessionizer recordings list")
		}
		return removeParts(parts)
	}
	r, err := s.Get(id)
	if err != nil {
		return 0, err
	}
	return removeParts(r.parts)
}

func removeParts(parts []part) (removed int64, err error) {
	for _, p := range parts {
		if err := p.remove(); err != nil {
			return removed, err
		}
		removed += p.size
	}
	if len(parts) > 0 {
		_ = os.Remove(parts[0].dir) // fails while other recordings are in it
	}
	return removed, nil
}

// Expired returns the sessions and tasks whose recordings have not changed since before, with their size.
func (s Store) Expired(before time.Time) (sizes map[string]int64, err error) {
	all, err := s.subjects()
	if err != nil {
		return nil, err
	}
	sizes = map[string]int64{}
	for _, id := range all {
		parts, err := listParts(s.Subject(id))
		if err != nil {
			return nil, err
		}
		size := int64(0)
		for _, p := range parts {
			size += p.size
		}
		if st, err := os.Stat(s.Subject(id)); err != nil || len(parts) == 0 && st.ModTime().After(before) {
			continue // removed meanwhile, or a recording begins
		}
		if !slices.ContainsFunc(parts, func(p part) bool { return p.changed.After(before) }) {
			sizes[id] = size
		}
	}
	return sizes, nil
}
