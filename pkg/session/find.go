package session

import (
	"context"
	"fmt"
	"iter"
	"path"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// A repository can have several sessions. One has no label; owner/repo names it. The label of
// every other session follows an "@": owner/repo@LABEL. A session that was opened as
// owner/repo@BRANCH has the branch as its label.

// labels returns the labels that the new session may get, in order of preference.
func (r Request) labels() iter.Seq[string] {
	return func(yield func(string) bool) {
		if !r.New || r.Label != "" {
			yield(r.Label)
			return
		}
		branch := r.Repo.Branch
		for n := 1; ; n++ {
			label := branch
			switch {
			case n > 1 && branch == "":
				label = fmt.Sprint(n)
			case n > 1:
				label = fmt.Sprintf("%s-%d", branch, n)
			}
			if !yield(label) {
				return
			}
		}
	}
}

// named is what a person can call a session.
type named struct{ id, name, repoKey, repo, label, task string }

func (s Session) named() named {
	return named{s.ID, s.Name, s.RepoKey, s.Session.Repo, s.Label, s.Task}
}

// reference is a name that a person typed.
type reference struct {
	text       string
	key, label string // if it is a repository
}

func parseReference(text string) reference {
	ref, _ := repo.ParseRemote(text)
	return reference{text, ref.Key, ref.Branch}
}

// exact reports whether the reference is the full name, the id or the repository and label.
// owner/repo means github.com, because any other host could claim to have a repository of
// that name. A repository's session is the person's, not one of its tasks'.
func (r reference) exact(n named) bool {
	return n.name == r.text || n.id == r.text ||
		n.task == "" && (n.repoKey == r.text && n.label == "" || r.key != "" && n.repoKey == r.key && n.label == r.label)
}

// short reports whether the reference is an abbreviation of what exact accepts. This is one
// rule, not two: the repository "cafe" and the id cafe01… are ambiguous, and the caller may
// destroy what Find returns.
func (r reference) short(n named) bool {
	return len(r.text) >= 4 && (strings.HasPrefix(n.id, r.text) || strings.HasSuffix(n.name, "-"+r.text)) ||
		n.task == "" && strings.EqualFold(withLabel(path.Base(n.repo), n.label), r.text)
}

// repository reports whether the reference is the repository of n, which has a label.
func (r reference) repository(n named) bool {
	return n.task == "" && n.label != "" && r.label == "" &&
		(n.repoKey == r.text || r.key != "" && n.repoKey == r.key || strings.EqualFold(path.Base(n.repo), r.text))
}

func withLabel(repo, label string) string {
	if label != "" {
		return repo + "@" + label
	}
	return repo
}

// ByLabel returns a person's session of a repository. Without a label, it returns the session that
// has none, or else the only one.
func (m *Manager) ByLabel(ctx context.Context, key, label string) (Session, error) {
	r := reference{text: key, key: key, label: label}
	return m.find(ctx, key, r.exact, r.repository)
}

// Find resolves what a person typed: a session's name, its id or the start of it, the
// repository with the label, or the repository's short name with the label when only one
// matches. A repository whose sessions all have labels means the only one.
func (m *Manager) Find(ctx context.Context, what string) (Session, error) {
	r := parseReference(what)
	return m.find(ctx, what, r.exact, r.short, r.repository)
}

// FindExact resolves what a person typed, as Find does, but never guesses the label. It
// suits what cannot be undone: if owner/repo was destroyed, then owner/repo must not mean
// owner/repo@LABEL.
func (m *Manager) FindExact(ctx context.Context, what string) (Session, error) {
	r := parseReference(what)
	s, err := m.find(ctx, what, r.exact, r.short)
	if fail.CodeOf(err) != fail.NotFound {
		return s, err
	}
	s, other := m.find(ctx, what, r.repository)
	switch {
	case other == nil:
		err = fail.New(fail.NotFound, "no session %q, but %s exists", what, s.DisplayName()).WithHint("agent-sessionizer list")
	case fail.CodeOf(other) == fail.Usage: // several
		err = other
	}
	return Session{}, err
}

// find returns the session that the first of the rules matches which matches any.
func (m *Manager) find(ctx context.Context, what string, rules ...func(named) bool) (Session, error) {
	all, err := m.List(ctx)
	if err != nil {
		return Session{}, err
	}
	for _, match := range rules {
		var found []Session
		for _, s := range all {
			if match(s.named()) {
				found = append(found, s)
			}
		}
		s, ok, err := lifecycle.Only(found, what, "agent-sessionizer list", func(s Session) string { return s.Name })
		if ok || err != nil {
			return s, err
		}
	}
	return Session{}, fail.New(fail.NotFound, "no session %q", what).WithHint("agent-sessionizer list")
}

// Ended reports whether what is the exact name of a session that is gone.
func (m *Manager) Ended(ctx context.Context, what string) (bool, error) {
	rows, err := m.Store.Sessions(ctx, true)
	if err != nil {
		return false, err
	}
	r := parseReference(what)
	for _, row := range rows {
		n := named{row.ID, row.Name, row.RepoKey, row.Repo, row.Label, row.Task}
		if Phase(row.Phase) == Gone && (r.exact(n) || strings.HasPrefix(row.RepoKey, "local:") && strings.EqualFold(withLabel(row.Repo, row.Label), what)) {
			return true, nil
		}
	}
	return false, nil
}
