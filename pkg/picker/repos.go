package picker

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// recently is how many repositories are offered because they recently had a session.
const recently = 20

// repository is a row below the separator line, with the data for its preview.
type repository struct {
	key    string // from repo.Ref
	branch string // that the user's list names
	open   string // the argument for `open`
	name   string
	listed bool      // in repos.txt
	used   time.Time // when its last session ended
	path   string    // of a local clone
}

// repositories returns the repositories without a session, each once: first the user's
// own list, then the recently used ones, then those on the disk.
func repositories(all, ended []session.Session, listed []string, clones []Clone) []repository {
	var rows []*repository
	byKey := map[string]*repository{}
	for _, s := range all {
		byKey[s.RepoKey], byKey[s.RepoKey+"@"+s.Label] = nil, nil // it has a session
	}
	// For a path in repos.txt, the key is known from a session or clone for which git
	// was asked.
	keyOf := map[string]string{}
	for _, s := range append(ended, all...) {
		if path := s.Spec.Repo.Path; path != "" {
			keyOf[path] = s.RepoKey
		}
	}
	for _, c := range clones {
		keyOf[c.Path] = c.Key
	}
	add := func(r repository) *repository {
		key := r.key
		if r.branch != "" {
			key += "@" + r.branch
		}
		known, ok := byKey[key]
		if !ok {
			known = &r
			byKey[key] = known
			rows = append(rows, known)
		}
		return known
	}
	for _, line := range listed {
		r := repository{key: repo.KeyOf(line), open: line, name: line}
		if path := localPath(line); path != "" {
			r = repository{key: keyOf[path], open: path, name: tilde(path), path: path}
			if r.key == "" {
				r.key = "local:" + path
			}
		} else if ref, err := repo.Parse(line, "/"); err == nil {
			if r.name, r.branch = displayName(ref.Key, ref.Slug), ref.Branch; r.branch != "" {
				r.name += "@" + r.branch
			}
		} else {
			r.key = "text:" + line // `open` reports what is wrong with it
		}
		if known := add(r); known != nil {
			known.listed = true
		}
	}
	for _, r := range rows { // one row is enough for a repository that is listed with a branch
		if _, ok := byKey[r.key]; !ok {
			byKey[r.key] = r
		}
	}
	for _, s := range ended {
		r := repository{key: s.RepoKey, open: s.Spec.Repo.URL, name: s.RepoName()}
		if path := s.Spec.Repo.Path; path != "" {
			r.open, r.path = path, path
		}
		if r.open == "" {
			continue
		}
		if known := add(r); known != nil && known.used.IsZero() {
			known.used = s.StateChangedAt
		}
	}
	for _, c := range clones {
		known := add(repository{key: c.Key, open: c.Path, name: displayName(c.Key, c.Slug), path: c.Path})
		if known != nil && known.path == "" {
			known.path = c.Path
		}
	}
	out := make([]repository, len(rows))
	for i, r := range rows {
		out[i] = *r
	}
	return out
}

// displayName returns the display name of a repository, in the form of
// session.View.RepoName.
func displayName(key, slug string) string {
	return session.View{RepoKey: key, Repo: slug}.RepoName()
}

// localPath returns the absolute path that a line of repos.txt names, "" if it names
// none.
func localPath(line string) string {
	if rest, ok := strings.CutPrefix(line, "~/"); ok {
		if home, err := os.UserHomeDir(); err == nil {
			return filepath.Join(home, rest)
		}
	}
	if filepath.IsAbs(line) {
		return filepath.Clean(line)
	}
	return ""
}

// tilde shortens a path below the home directory.
func tilde(path string) string {
	home, err := os.UserHomeDir()
	if rest, ok := strings.CutPrefix(path, home+string(filepath.Separator)); err == nil && ok {
		return filepath.Join("~", rest)
	}
	return path
}

// workState is a session with what its keeper last saw of its work.
type workState struct {
	session.View
	host   string // in the cluster, "" for this one
	branch string
	ahead  int       // commits that exist nowhere else
	seen   time.Time // when the keeper saw it
}

// readWorkState reads what is known about a session's work, from files and the row only.
func (p *Picker) readWorkState(s session.Session) workState {
	seen := workState{View: s.View(), branch: s.View().Branch}
	if w := s.Status.Work; w != nil && s.Phase != session.Ready { // from the last clean stop
		seen.branch, seen.ahead = w.Branch, w.Ahead
		return seen
	}
	// If there is no observation or it cannot be read, the row goes without it.
	if g, at, err := session.Observation(p.Manager.Config.Paths, s); err == nil {
		seen.seen = at
		if g.Changes != nil {
			seen.branch, seen.ahead = g.Changes.Branch, g.Changes.Commits
		}
	}
	return seen
}

// read returns everything that the picker shows.
func (p *Picker) read(ctx context.Context) ([]workState, []repository, error) {
	all, err := p.Manager.List(ctx)
	if err != nil {
		return nil, nil, err
	}
	all = slices.DeleteFunc(all, func(s session.Session) bool { return s.Task != "" })
	ended, err := p.endedSessions(ctx, all)
	if err != nil {
		return nil, nil, err
	}
	var states []workState
	for _, s := range all {
		states = append(states, p.readWorkState(s))
	}
	for _, r := range p.others.get() {
		states = append(states, workState{View: r.View, host: r.Host, branch: r.Branch})
	}
	order(states)
	return states, repositories(all, ended, p.Listed, p.clones.read()), nil
}

// endedSessions returns the last sessions that are gone, for their repositories. It reads them
// again when another session has gone.
func (p *Picker) endedSessions(ctx context.Context, all []session.Session) ([]session.Session, error) {
	var ids strings.Builder
	for _, s := range all {
		ids.WriteString(s.ID)
	}
	if p.endedKnown && p.endedFor == ids.String() {
		return p.endedLast, nil
	}
	ended, err := p.Manager.Recent(ctx, recently)
	if err == nil {
		p.endedLast, p.endedFor, p.endedKnown = ended, ids.String(), true
	}
	return ended, err
}
