package review

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// record is what is kept of the review of one session in one clone.
type record struct {
	Clone   string                `json:"clone"`
	Landed  landedTree            `json:"landed"`
	Landing *landing              `json:"landing,omitempty"` // announced last; it may have been interrupted
	Files   map[string]*fileMarks `json:"files,omitempty"`   // by path
	Notes   []Note                `json:"notes,omitempty"`
}

// landing is a commit that a branch gets, and what has landed then.
type landing struct {
	Branch string                `json:"branch"`
	Commit string                `json:"commit"`
	Before landedTree            `json:"before"`
	After  landedTree            `json:"after"`
	Marks  map[string]*fileMarks `json:"marks"` // of what lands
}

// landedTree is what the agent started from, with everything that has landed since.
type landedTree struct {
	Base string `json:"base,omitempty"` // commit
	Tree string `json:"tree,omitempty"` // "" if nothing has landed
}

// fileMarks are the chosen changes of one file.
type fileMarks struct {
	File File         `json:"file"`            // the versions that the marks refer to
	All  bool         `json:"all,omitempty"`   // everything between these versions
	Keys map[Key]bool `json:"keys,omitempty"`  // otherwise these changes
	Of   int          `json:"total,omitempty"` // number of changes between these versions
}

func (m *fileMarks) clone() *fileMarks {
	if m == nil {
		return nil
	}
	c := *m
	c.Keys = maps.Clone(m.Keys)
	return &c
}

// empty reports whether nothing is chosen.
func (m *fileMarks) empty() bool { return m == nil || !m.All && len(m.Keys) == 0 }

// mark returns how much of a file, as it is now, the marks choose.
func (m *fileMarks) mark(f File) Mark {
	switch {
	case m.empty():
		return None
	case m.File == f && (m.All || len(m.Keys) == m.Of):
		return All
	}
	return Part
}

const (
	maxRecord = 64 << 20 // bytes of a file with marks
	maxNotes  = 1000
	maxNote   = 8000 // bytes of a note
	lockTime  = 10 * time.Second
)

// recordFile is where a record is stored. Several processes may change it.
type recordFile struct{ path, clone, session string }

func (o Options) recordFile(session string) recordFile {
	sum := sha256.Sum256([]byte(o.Clone))
	return recordFile{filepath.Join(o.Dir, session+"-"+hex.EncodeToString(sum[:6])+".json"), o.Clone, session}
}

// read returns the record, an empty one if none was written yet.
func (f recordFile) read() (r record, err error) {
	r = record{Clone: f.clone, Files: map[string]*fileMarks{}}
	info, err := os.Stat(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return r, nil
	}
	if err == nil && info.Size() > maxRecord {
		err = fmt.Errorf("must have at most %d bytes, got %d", maxRecord, info.Size())
	}
	var content []byte
	if err == nil {
		content, err = os.ReadFile(f.path)
	}
	if err == nil {
		err = json.Unmarshal(content, &r)
	}
	if err != nil {
		return r, fail.New(fail.Host, "read the choices of the review: %w", err).WithHint("rm %s # deletes choices and notes; shows everything again", ssh.Quote(f.path))
	}
	if r.Files == nil {
		r.Files = map[string]*fileMarks{}
	}
	for path, m := range r.Files {
		if m.empty() {
			delete(r.Files, path)
		}
	}
	return r, nil
}

// readLanded reads the record like read. If a landing was interrupted after its branch had the commit,
// readLanded completes the record first.
func (f recordFile) readLanded(ctx context.Context, trees *repo.Trees) (r record, err error) {
	r, err = f.read()
	if err != nil || r.Landing == nil {
		return r, err
	}
	commit, err := trees.Commit(ctx, r.Landing.Commit)
	if err != nil || commit == "" {
		return r, err
	}
	tip, err := trees.Commit(ctx, "refs/heads/"+r.Landing.Branch)
	if err != nil || tip == "" {
		return r, err
	}
	if has, err := trees.Contains(ctx, tip, commit); err != nil || !has {
		return r, err
	}
	return f.landed(r.Landing)
}

// update changes the record under a lock, and returns it. If change fails, the record stays.
func (f recordFile) update(change func(*record) error) (record, error) {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o700); err != nil {
		return record{}, fail.New(fail.Host, "create directory of reviews: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockTime) // another process holds it for a moment only
	defer cancel()
	lock, err := lockfile.Wait(ctx, f.path+".lock", nil)
	if err != nil {
		return record{}, fail.New(fail.Host, "lock the choices of the review: %w", err)
	}
	defer lock.Unlock()
	r, err := f.read()
	if err != nil {
		return r, err
	}
	if err := change(&r); err != nil {
		return r, err
	}
	content, err := json.Marshal(r)
	if err == nil {
		err = atomicfile.Write(f.path, content, 0o600)
	}
	if err != nil {
		err = fail.New(fail.Host, "save the choices of the review: %w", err)
	}
	return r, err
}

// announce records that a branch is about to get a commit. It fails if another process landed something
// meanwhile.
func (f recordFile) announce(l *landing) error {
	_, err := f.update(func(r *record) error {
		if r.Landed != l.Before {
			return errMeanwhile(f.session)
		}
		r.Landing = l
		return nil
	})
	return err
}

// landed records that a landing is complete. It fails if another process landed something else meanwhile.
func (f recordFile) landed(l *landing) (record, error) {
	return f.update(func(r *record) error {
		switch r.Landed {
		case l.Before:
		case l.After: // another process has seen the announced commit
			return nil
		default:
			return errMeanwhile(f.session)
		}
		r.Landed, r.Landing = l.After, nil
		for path, was := range l.Marks {
			if r.Files[path] = r.Files[path].without(was); r.Files[path].empty() {
				delete(r.Files, path)
			}
		}
		return nil
	})
}

// without returns the marks less those that were chosen when a landing began. Marks of a whole file go too,
// because some of what they choose has landed: what is chosen must never be more than the user meant.
func (m *fileMarks) without(was *fileMarks) *fileMarks {
	if m == nil || m.All || was.All {
		return nil
	}
	rest := m.clone()
	maps.DeleteFunc(rest.Keys, func(k Key, _ bool) bool { return was.Keys[k] })
	return rest
}

// note returns the place of a note in a record, -1 if it is gone.
func (r *record) note(id string) int {
	return slices.IndexFunc(r.Notes, func(n Note) bool { return n.ID == id })
}
