package review

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// selection is what a landing takes of one attempt.
type selection struct {
	attempt *Attempt
	number  int
	marks   map[string]*fileMarks // as they were when the landing began
	edits   map[string]repo.Entry // that make what has landed into what will have landed
	before  map[string]repo.Entry // the old version of each edited file
	files   []string              // that change, by the path that the agent has them at
}

// selectChanges works out the files that result from the chosen changes.
func (a *Attempt) selectChanges(ctx context.Context, number int, marks map[string]*fileMarks) (*selection, error) {
	s := &selection{attempt: a, number: number, marks: marks, edits: map[string]repo.Entry{}, before: map[string]repo.Entry{}}
	for i, f := range a.files {
		m := marks[f.Path]
		if m.empty() {
			continue
		}
		before := len(s.edits)
		if m.File == f && m.All {
			s.whole(f)
		} else if err := s.part(ctx, i, m); err != nil {
			return nil, err
		}
		if len(s.edits) > before {
			s.files = append(s.files, f.Path)
		}
	}
	return s, s.checkPlaces()
}

// whole selects a file with everything that changed in it.
func (s *selection) whole(f File) {
	if f.OldPath != "" {
		s.edits[f.OldPath] = repo.Entry{}
	}
	s.edits[f.Path], s.before[f.Path] = f.new(), f.old()
}

// part selects some changes of a file.
func (s *selection) part(ctx context.Context, i int, m *fileMarks) error {
	p, err := s.attempt.Patch(ctx, i)
	if err != nil {
		return err
	}
	chosen, err := s.attempt.meant(ctx, p, m)
	if err != nil {
		return err
	}
	switch {
	case len(chosen) == 0:
		return nil
	case len(chosen) == len(p.Keys()):
		s.whole(p.File)
		return nil
	}
	old := ""
	if p.OldID != "" {
		var size int64
		if old, size, err = s.attempt.trees.Blob(ctx, p.OldID, maxShown); err != nil {
			return err
		} else if size > maxShown {
			return fmt.Errorf("read old version of %s: larger than %d MiB", printable(p.Path), maxShown>>20)
		}
	}
	result := p.old()
	where := p.oldPath()
	if chosen[p.Meta] || p.Status == Added {
		result.Mode = p.NewMode
		if where != p.Path {
			s.edits[where], where = repo.Entry{}, p.Path
		}
	}
	if len(p.Hunks) > 0 {
		text := p.apply(old, func(k Key) bool { return chosen[k] })
		if result.ID, err = s.attempt.trees.WriteBlob(ctx, text); err != nil {
			return fmt.Errorf("write %s: %w", printable(p.Path), err)
		}
	}
	s.edits[where], s.before[where] = result, p.old()
	return nil
}

// meant returns the keys of a patch that marks choose. The marks may be of an older version.
func (a *Attempt) meant(ctx context.Context, p *Patch, m *fileMarks) (map[Key]bool, error) {
	keys := m.Keys
	if m.All {
		old := p
		if m.File != p.File {
			var err error
			if old, err = readPatch(ctx, a.trees, m.File); ctx.Err() != nil {
				return nil, err
			} else if err != nil {
				return nil, nil //nolint:nilerr // that version is gone, so nothing of it is chosen
			}
		}
		keys = map[Key]bool{}
		for _, k := range old.Keys() {
			keys[k] = true
		}
	}
	chosen := map[Key]bool{}
	for _, k := range p.Keys() {
		if keys[k] {
			chosen[k] = true
		}
	}
	return chosen, nil
}

// checkPlaces refuses a file whose name is that of a directory that stays, and the reverse. git would
// remove what stays, although the user has not chosen that.
func (s *selection) checkPlaces() error {
	stays, above := map[string]string{}, map[string]string{} // old files that stay, and the directories above them
	for _, f := range s.attempt.changed {
		name := f.oldPath()
		if e, edited := s.edits[name]; f.OldID == "" || edited && e == (repo.Entry{}) {
			continue
		}
		stays[name] = name
		for dir := range parents(name) {
			above[dir] = name
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.edits)) {
		if s.edits[name] == (repo.Entry{}) {
			continue
		}
		other := above[name]
		for dir := range parents(name) {
			if stays[dir] != "" {
				other = stays[dir]
			}
		}
		if other != "" {
			return fail.New(fail.Conflict, "cannot land %s without the removal of %s: choose both", printable(name), printable(other)).
				WithHint("agent-sessionizer review %s", s.attempt.source.Name)
		}
	}
	return nil
}

// parents yields the directories above a path.
func parents(path string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for i := range len(path) {
			if path[i] == '/' && !yield(path[:i]) {
				return
			}
		}
	}
}

// printable returns a path for a message.
func printable(path string) string { return termtext.Brief(termtext.Line(path), 200) }
