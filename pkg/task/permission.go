package task

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// Permission says which tasks a client other than the user may submit. The zero value
// permits none.
type Permission struct {
	// Repositories holds keys, such as github.com/acme/app; patterns for all keys
	// below one, such as github.com/acme/*; or "*", which is every repository on a
	// public host.
	Repositories []string `json:"repositories,omitempty"`
	// Profiles lists those that a manifest may name. It need not name one.
	Profiles []string `json:"profiles,omitempty"`
}

// AnyRepository permits every repository on a public host.
const AnyRepository = "*"

// ErrNotPermitted means that the client's Permission does not allow a task. It is
// returned wrapped.
var ErrNotPermitted = errors.New("not permitted")

// ParsePermission reads repositories as users write them: acme/app, acme/*,
// host/acme/app, a URL, or *.
func ParsePermission(repositories, profiles []string) (p Permission, err error) {
	for _, text := range repositories {
		key := repo.KeyOf(text)
		if below, ok := strings.CutSuffix(text, "/*"); ok {
			if one := repo.KeyOf(below + "/x"); one != "" {
				key = strings.TrimSuffix(one, "x") + "*"
			}
		}
		if text == AnyRepository {
			key = text
		}
		if key == "" || strings.HasPrefix(key, "local:") {
			return Permission{}, fail.New(fail.Usage, "%q must be OWNER/REPO, OWNER/*, HOST/OWNER/REPO, a git URL or *", text).
				WithHint("agent-sessionizer serve token add ci --scope submit --repo acme/app")
		}
		p.Repositories = append(p.Repositories, key)
	}
	p.Profiles = slices.Clone(profiles)
	return p, nil
}

// Client is the person or program that asks for a change of a task.
type Client struct {
	Actor      string      // as in the audit log, such as token:ci
	Permission *Permission // nil for the user, who may change every task
}

// checkOwner refuses a client below admin the tasks that others submitted. Every
// client may read them; nothing here limits that.
func (c Client) checkOwner(t Task) error {
	if c.Permission == nil || c.Actor == t.Status.Actor {
		return nil
	}
	return fail.New(fail.Policy, "%w: another client submitted task %s", ErrNotPermitted, t.ID).
		WithHint("use the token that submitted it, or one with the scope admin")
}

// allows reports whether a repository is permitted.
func (p Permission) allows(key string) bool {
	return slices.ContainsFunc(p.Repositories, func(pattern string) bool {
		below, ok := strings.CutSuffix(pattern, "*")
		return pattern == key || ok && strings.HasPrefix(key, below)
	})
}

// restrict refuses what a client below admin must not have a task do. A secret's
// reference reads a variable, a file or a vault of the user, or runs a command as the
// user. A path reads this host's disk. In one of the user's sessions, the agent has
// everything that the user gave to it. A fetch from this host's network with the
// user's credentials shows the client what answers there. With a nil Permission the
// task was permitted before, and only its repository is checked.
func (m *Manager) restrict(ctx context.Context, asked *manifest.Task, p *Permission) error {
	refuse := func(hint, format string, args ...any) error {
		return fail.New(fail.Policy, "%w: "+format, append([]any{ErrNotPermitted}, args...)...).WithHint("%s", hint)
	}
	needsAdmin := func(what, instead string) error {
		return refuse("use a token with the scope admin, or "+instead, "the manifest has %s, which needs the scope admin", what)
	}
	switch url := asked.Repository.URL; {
	case len(asked.Secrets) > 0 && p != nil:
		return needsAdmin("secrets", "put them into the configuration of this host")
	case asked.VM.Workspace != "":
		return needsAdmin("a workspace", "leave vm.workspace out")
	case asked.VM.Session != "":
		return needsAdmin("an existing session", "leave vm.session out: the task gets its own session")
	case path.IsAbs(url) || strings.HasPrefix(url, ".") || strings.HasPrefix(url, "~") || strings.HasPrefix(strings.ToLower(url), "file:"):
		return needsAdmin("a repository on this host's disk", "name a repository by owner/repo or its URL")
	}
	ref, err := repo.Parse(asked.Repository.URL, "/")
	if err != nil {
		return err
	}
	if p != nil {
		if !p.allows(ref.Key) {
			return refuse("agent-sessionizer serve token add NAME --scope submit --repo "+ref.Key+" # on the host; creates a token that may use it",
				"the token may not use the repository %s", ref.Key)
		}
		if profile := asked.VM.Profile; profile != "" && !slices.Contains(p.Profiles, profile) {
			return refuse("leave vm.profile out, or on the host: agent-sessionizer serve token add NAME --scope submit --profile PROFILE",
				"the token may not use the profile %s", profile)
		}
	}
	check := m.CheckPublic
	if check == nil {
		check = repo.CheckPublic
	}
	if err := check(ctx, ref); err != nil {
		return refuse("name a repository on a public host, by https or ssh", "%w", err)
	}
	return nil
}
