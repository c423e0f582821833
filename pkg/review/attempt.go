package review

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Attempt is what one agent changed, and what the user marked of it. Files and their numbers
// stay the same for the life of an Attempt: Refresh and Land replace the attempts of a Work.
// Methods that read a patch use git, and take a moment; the others do not.
type Attempt struct {
	source Source
	trees  *repo.Trees
	file   recordFile

	head, base, upstream       string     // commits
	headTree, baseTree, landed string     // trees
	ref, refID                 string     // the reference that keeps what has landed
	was                        landedTree // as recorded
	changed                    []File     // all that differ from what has landed
	files                      []File     // those of changed that match Options.Paths, sorted
	done                       []string

	mu      sync.Mutex
	rec     record
	patches map[int]*Patch
	kept    int // bytes of the patches
}

// maxKept limits the patches that an attempt keeps in memory, in bytes of text.
const maxKept = 64 << 20

// Source returns where the attempt comes from.
func (a *Attempt) Source() Source { return a.source }

// Head returns the agent's latest commit.
func (a *Attempt) Head() string { return a.head }

// Files returns the files that differ from what has landed, sorted by path.
func (a *Attempt) Files() []File { return a.files }

// Landed returns the paths of the files of which everything has landed.
func (a *Attempt) Landed() []string { return a.done }

// matches reports whether a file, or the one that it was renamed from, is in one of the paths. Without
// paths, every file is.
func (f File) matches(paths []string) bool {
	for _, p := range paths {
		p = path.Clean(p)
		for _, name := range []string{f.Path, f.OldPath} {
			if p == "." || name == p || name != "" && strings.HasPrefix(name, p+"/") {
				return true
			}
		}
	}
	return len(paths) == 0
}

// Patch reads the difference of a file.
func (a *Attempt) Patch(ctx context.Context, file int) (*Patch, error) {
	a.mu.Lock()
	p := a.patches[file]
	a.mu.Unlock()
	if p != nil {
		return p, nil
	}
	f := a.files[file]
	p, err := readPatch(ctx, a.trees, f)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", termtext.Brief(termtext.Line(f.Path), 200), err)
	}
	if err := a.settle(ctx, p); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if size := p.size(); a.kept+size > maxKept {
		a.patches, a.kept = map[int]*Patch{}, size
	} else {
		a.kept += size
	}
	a.patches[file] = p
	return p, nil
}

func (p *Patch) size() (n int) {
	for _, h := range p.Hunks {
		for _, l := range h.Lines {
			n += len(l.Text) + 100
		}
	}
	return n
}

// settle moves the marks of an older version of a file to this one, as far as they mean the same changes.
func (a *Attempt) settle(ctx context.Context, p *Patch) error {
	a.mu.Lock()
	m := a.rec.Files[p.Path].clone()
	a.mu.Unlock()
	if m.empty() || m.File == p.File {
		return nil
	}
	chosen, err := a.meant(ctx, p, m)
	if err != nil {
		return err
	}
	now := p.marks()
	now.Keys = chosen
	a.mu.Lock()
	defer a.mu.Unlock()
	if is := a.rec.Files[p.Path]; is != nil && is.File == m.File {
		a.rec.Files[p.Path] = now
	}
	return nil
}

// marks returns marks of this version that choose nothing.
func (p *Patch) marks() *fileMarks {
	return &fileMarks{File: p.File, Keys: map[Key]bool{}, Of: len(p.Keys())}
}

// Mark returns how much of a file was chosen.
func (a *Attempt) Mark(file int) Mark {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.files[file]
	return a.rec.Files[f.Path].mark(f)
}

// Chosen reports whether a change of a file was chosen.
func (a *Attempt) Chosen(file int, k Key) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.files[file]
	m := a.rec.Files[f.Path]
	return m != nil && (m.All && m.File == f || m.Keys[k])
}

// Choose marks changes of a file as chosen, or as not chosen. It needs the file's patch, and
// saves the marks at once.
func (a *Attempt) Choose(ctx context.Context, file int, on bool, keys ...Key) error {
	p, err := a.Patch(ctx, file)
	if err != nil {
		return err
	}
	known := map[Key]bool{}
	for _, k := range p.Keys() {
		known[k] = true
	}
	return a.save(func(r *record) {
		m := r.Files[p.Path].clone()
		if m == nil || m.File != p.File || m.All {
			was := a.chosenKeys(p, r.Files[p.Path])
			m = p.marks()
			m.Keys = was
		}
		for _, k := range keys {
			switch {
			case !on:
				delete(m.Keys, k)
			case known[k]:
				m.Keys[k] = true
			}
		}
		r.set(p.Path, m)
	})
}

// chosenKeys returns the keys of a patch that marks choose. Marks of another version that another process
// saved count only where their keys are the same.
func (a *Attempt) chosenKeys(p *Patch, saved *fileMarks) map[Key]bool {
	chosen := map[Key]bool{}
	m := saved
	if is := a.rec.Files[p.Path]; saved != nil && is != nil && is.File == p.File && saved.File != p.File {
		m = is // settled
	}
	if m.empty() {
		return chosen
	}
	for _, k := range p.Keys() {
		if m.Keys[k] || m.All && m.File == p.File {
			chosen[k] = true
		}
	}
	return chosen
}

// set replaces the marks of a file.
func (r *record) set(path string, m *fileMarks) {
	if m.empty() {
		delete(r.Files, path)
	} else {
		r.Files[path] = m
	}
}

// ChooseFile marks a whole file, without reading its patch.
func (a *Attempt) ChooseFile(file int, on bool) error {
	f := a.files[file]
	return a.save(func(r *record) { r.set(f.Path, f.allMarks(on)) })
}

// ChooseAll marks all files.
func (a *Attempt) ChooseAll(on bool) error {
	return a.save(func(r *record) {
		for _, f := range a.files {
			r.set(f.Path, f.allMarks(on))
		}
	})
}

// allMarks returns marks that choose the whole file, or nothing.
func (f File) allMarks(on bool) *fileMarks {
	if !on {
		return nil
	}
	return &fileMarks{File: f, All: true}
}

// save changes the record, on disk and here.
func (a *Attempt) save(change func(*record)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	r, err := a.file.update(func(r *record) error { change(r); return nil })
	if err != nil {
		return err
	}
	for path, m := range a.rec.Files { // settled here, and not on disk yet
		if saved := r.Files[path]; saved != nil && saved.File != m.File && a.has(m.File) {
			r.Files[path] = m
		}
	}
	a.rec = r
	return nil
}

// has reports whether a version of a file is the one of this attempt.
func (a *Attempt) has(f File) bool {
	i, ok := slices.BinarySearchFunc(a.files, f.Path, func(g File, path string) int { return strings.Compare(g.Path, path) })
	return ok && a.files[i] == f
}

// Notes returns the notes on this attempt, the oldest first.
func (a *Attempt) Notes() []Note {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.rec.Notes)
}

// AddNote saves a note on a target.
func (a *Attempt) AddNote(t Target, text string) (Note, error) {
	text = strings.TrimSpace(termtext.Lines(text))
	if text == "" || len(text) > maxNote {
		return Note{}, fail.New(fail.Usage, "a note must have 1 to %d bytes, got %d", maxNote, len(text))
	}
	t.Quote = termtext.Brief(termtext.Line(t.Quote), 200)
	n := Note{ID: ids.New(), Target: t, Text: text, At: time.Now().UTC()}
	full := false
	err := a.save(func(r *record) {
		if full = len(r.Notes) >= maxNotes; !full {
			r.Notes = append(r.Notes, n)
		}
	})
	if err == nil && full {
		err = fail.New(fail.Conflict, "too many notes: the limit is %d", maxNotes).WithHint("agent-sessionizer review --send %s", a.source.Name)
	}
	return n, err
}

// RemoveNote removes a note.
func (a *Attempt) RemoveNote(id string) error {
	return a.save(func(r *record) {
		if i := r.note(id); i >= 0 {
			r.Notes = slices.Delete(r.Notes, i, i+1)
		}
	})
}

// maxPrompt is the length of a prompt, in bytes.
const maxPrompt = 15_000

// Prompt returns notes that were not sent, and the prompt with them; "" if all were sent. Notes that do not fit
// into one prompt are left for the next.
func (a *Attempt) Prompt() (prompt string, notes []Note) {
	var b strings.Builder
	fmt.Fprintf(&b, "Please address these remarks on your work, as of commit %.12s:\n", a.head)
	for _, n := range a.Notes() {
		if !n.Sent.IsZero() {
			continue
		}
		text := n.String()
		if b.Len()+len(text) > maxPrompt {
			break
		}
		b.WriteString(text)
		notes = append(notes, n)
	}
	if len(notes) == 0 {
		return "", nil
	}
	return b.String(), notes
}

// String returns the note as the agent reads it.
func (n Note) String() string {
	place := termtext.Brief(termtext.Line(n.Path), 500)
	if n.Line > 0 {
		place += fmt.Sprintf(":%d", n.Line)
	}
	if n.Removed {
		place += " (removed line)"
	}
	if n.Quote != "" {
		place += fmt.Sprintf(" `%s`", n.Quote)
	}
	return "\n- " + place + "\n  " + strings.ReplaceAll(n.Text, "\n", "\n  ") + "\n"
}

// MarkSent records that the agent has these notes. Notes written meanwhile stay unsent.
func (a *Attempt) MarkSent(notes []Note) error {
	now := time.Now().UTC()
	return a.save(func(r *record) {
		for _, n := range notes {
			if i := r.note(n.ID); i >= 0 && r.Notes[i].Text == n.Text {
				r.Notes[i].Sent = now
			}
		}
	})
}

// chosen returns a copy of the marks of the files that have something chosen, or marks of all files in the
// given paths.
func (a *Attempt) chosen(paths []string) map[string]*fileMarks {
	a.mu.Lock()
	defer a.mu.Unlock()
	chosen := map[string]*fileMarks{}
	for _, f := range a.files {
		if len(paths) > 0 {
			if f.matches(paths) {
				chosen[f.Path] = f.allMarks(true)
			}
		} else if m := a.rec.Files[f.Path]; !m.empty() {
			chosen[f.Path] = m.clone()
		}
	}
	return chosen
}
