package session

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"path"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// A repository can have several sessions. One has no label; owner/repo names it. The label of
// every other session follows an "@": owner/repo@LABEL. A session that was opened as
// owner/repo@BRANCH has the branch as its label.

// withLabelHint returns err with another hint if the session was opened as owner/repo@LABEL and the
// repository has no such branch.
func (s Session) withLabelHint(err error) error {
	if fail.CodeOf(err) != fail.NotFound || s.Label == "" || s.Label != s.Spec.Repo.Branch {
		return err
	}
	return fail.New(fail.NotFound, "%w", err).WithHint("agent-sessionizer open %s --new %s", ssh.Quote(cmp.Or(s.Spec.Repo.Path, s.RepoName())), ssh.Quote(s.Label))
}

// labels returns the labels that the new session may get, in order of preference.
func (r Request) labels() iter.Seq[string] {
	return func(yield func(string) bool) {
		if !r.New || r.Label != "" || r.Task != "" {
			yield(r.Label)
			return
		}
		freeLabels(r.Repo.Branch)(yield)
	}
}

// freeLabels returns base, base-2, base-3 and so on. Without a base, it returns "", 2, 3 and so on.
func freeLabels(base string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for n := 1; ; n++ {
			label := base
			switch {
			case n > 1 && base == "":
				label = fmt.Sprint(n)
			case n > 1:
				label = fmt.Sprintf("%s-%d", base, n)
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
		n.task == "" && (withLabel(n.repoKey, n.label) == r.text || r.key != "" && n.repoKey == r.key && n.label == r.label)
}

// short reports whether the reference is the short name of the repository, with the label.
func (r reference) short(n named) bool {
	base, ok := strings.CutSuffix(r.text, withLabel("", n.label))
	return ok && n.task == "" && strings.EqualFold(path.Base(n.repo), base)
}

// abbreviates reports whether the reference is the start of the id, or its part in the name.
func (r reference) abbreviates(n named) bool {
	return len(r.text) >= 4 && (strings.HasPrefix(n.id, r.text) || strings.HasSuffix(n.name, "-"+r.text))
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
	s, _, err := m.find(ctx, reference{text: withLabel(key, label), key: key, label: label})
	return s, err
}

// Find resolves what a person typed: a session's name, its id or the start of it, the
// repository with the label, or the repository's short name with the label when only one
// matches. A repository whose sessions all have labels means the only one.
func (m *Manager) Find(ctx context.Context, what string) (Session, error) {
	s, _, err := m.find(ctx, parseReference(what))
	return s, err
}

// FindExact resolves what a person typed, as Find does, but never guesses the label. It
// suits what cannot be undone: if owner/repo was destroyed, then owner/repo must not mean
// owner/repo@LABEL.
func (m *Manager) FindExact(ctx context.Context, what string) (Session, error) {
	s, guessed, err := m.find(ctx, parseReference(what))
	if err == nil && guessed {
		return Session{}, fail.New(fail.NotFound, "no session %q, but %s exists", what, s.DisplayName()).WithHint("agent-sessionizer list")
	}
	return s, err
}

// find returns the session that a reference names. guessed says that the reference has no label,
// and the session has one.
func (m *Manager) find(ctx context.Context, r reference) (s Session, guessed bool, err error) {
	all, err := m.List(ctx)
	if err != nil {
		return Session{}, false, err
	}
	matching := func(match func(named) bool) (found []Session) {
		for _, s := range all {
			if match(s.named()) {
				found = append(found, s)
			}
		}
		return found
	}
	only := func(found []Session) (Session, bool, error) {
		return lifecycle.Only(found, r.text, "agent-sessionizer list", func(s Session) string { return s.Name })
	}
	if s, ok, err := only(matching(r.exact)); ok || err != nil {
		return s, false, err
	}
	// The repository "cafe" and the id cafe01… are ambiguous, because the caller may destroy
	// the session. That also holds if all sessions of the repository have labels.
	labelled := r.repository
	if slices.ContainsFunc(all, func(s Session) bool { return r.short(s.named()) }) {
		labelled = func(named) bool { return false }
	}
	s, ok, err := only(matching(func(n named) bool { return r.short(n) || r.abbreviates(n) || labelled(n) }))
	if ok || err != nil {
		return s, ok && !r.short(s.named()) && !r.abbreviates(s.named()), err
	}
	return Session{}, false, fail.New(fail.NotFound, "no session %q", r.text).WithHint("agent-sessionizer list")
}

// Ended reports whether what is the exact name of a session that is gone.
func (m *Manager) Ended(ctx context.Context, what string) (bool, error) {
	id, err := m.LastEnded(ctx, what)
	return id != "", err
}

// LastEnded returns the id of the newest session with that exact name that is gone, "" for none.
func (m *Manager) LastEnded(ctx context.Context, what string) (id string, err error) {
	rows, err := m.Store.Sessions(ctx, true)
	r := parseReference(what)
	for _, row := range rows { // oldest first
		n := named{row.ID, row.Name, row.RepoKey, row.Repo, row.Label, row.Task}
		if Phase(row.Phase) == Gone && (r.exact(n) || strings.HasPrefix(row.RepoKey, "local:") && strings.EqualFold(withLabel(row.Repo, row.Label), what)) {
			id = row.ID
		}
	}
	return id, err
}
