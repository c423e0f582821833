package ops

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// SecretCheck is a secret's reference and, after a check, its result. It never has the value.
type SecretCheck struct {
	Name      string `json:"name"`
	Reference string `json:"reference"`
	config.Binding
	OK      *bool  `json:"ok,omitempty"`
	Error   string `json:"error,omitempty"`
	Warning string `json:"warning,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

// SecretList lists the secrets that a session would get, by name.
type SecretList struct {
	Secrets []SecretCheck `json:"secrets" nullable:"false"`
}

// SecretQuery selects the settings that name the secrets.
type SecretQuery struct {
	Repo    string `query:"repo" maxLength:"4096" doc:"Repository of the session. Default: the settings for all repositories." example:"acme/app"`
	Profile string `query:"profile" maxLength:"255"`
}

// Operations on secrets.
var (
	ListSecrets = Operation[SecretQuery, SecretList]{Spec{
		ID: "listSecrets", Method: http.MethodGet, Path: "/api/v1/secrets", Tag: "secrets", Need: Admin, Errors: []int{404},
		Summary: "List the names and references of the secrets that a session would get",
	}, func(ctx context.Context, e *Engine, r *SecretQuery) (SecretList, error) {
		return e.secrets(ctx, r, false)
	}}

	CheckSecrets = Operation[SecretQuery, SecretList]{Spec{
		ID: "checkSecrets", Method: http.MethodPost, Path: "/api/v1/secrets/check", Tag: "secrets", Need: Admin, Errors: []int{404},
		Summary: "Resolve every reference and discard the values",
	}, func(ctx context.Context, e *Engine, r *SecretQuery) (SecretList, error) {
		return e.secrets(ctx, r, true)
	}}

	RefreshSecrets = Operation[SessionPath, RefreshedSecrets]{Spec{
		ID: "refreshSecrets", Method: http.MethodPost, Path: SessionsPath + "/{id}/secrets/refresh", Tag: "secrets", Need: Admin, Errors: []int{404, 409},
		Summary: "Resolve the secrets of a running session again",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (out RefreshedSecrets, err error) {
		out.Session, err = e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			s, out.Warnings, err = session.Secrets{Sessions: e.sessions()}.Refresh(ctx, s, func(v ...secret.Value) { e.Redact.Add(v...) })
			return s, err
		})
		return out, err
	}}
)

// RefreshedSecrets is a session whose secrets were resolved again.
type RefreshedSecrets struct {
	Session  session.View `json:"session"`
	Warnings []string     `json:"warnings,omitempty" doc:"Secrets that could not be resolved."`
}

func (e *Engine) secrets(ctx context.Context, r *SecretQuery, check bool) (SecretList, error) {
	list := SecretList{Secrets: []SecretCheck{}}
	key, ok := config.ParseRepoKey(r.Repo)
	if !ok && r.Repo != "" {
		return list, fail.New(fail.Usage, "repo must be owner/repo, host/owner/repo or a git URL, got %q", short(r.Repo)).WithHint("agent-sessionizer secrets list --repo owner/repo")
	}
	set, err := e.sessions().Config.For(key, r.Profile)
	if err != nil {
		return list, err
	}
	for _, name := range slices.Sorted(maps.Keys(set.Secrets)) {
		list.Secrets = append(list.Secrets, e.secret(ctx, name, set.Secrets[name], check))
	}
	if set.Network.Enforced() {
		for _, l := range session.Logins(e.sessions().Config.Paths, set.Logins, set.Secrets) {
			list.Secrets = append(list.Secrets, e.login(ctx, l, check))
		}
	}
	return list, nil
}

// CheckAllSecrets resolves every reference in the settings of all repositories and profiles, and those in
// own, and discards the values. From then on, Redact knows them.
func (e *Engine) CheckAllSecrets(ctx context.Context, own map[string]config.Secret) (list SecretList, err error) {
	type key struct{ name, from string }
	all := map[key]config.Secret{}
	add := func(secrets map[string]config.Secret) {
		for name, s := range secrets {
			all[key{name, s.From}] = s
		}
	}
	add(own)
	c := e.sessions().Config
	for _, repo := range append(c.Repos(), "") {
		for _, profile := range append(c.Profiles(), "") {
			set, failed := c.For(repo, profile)
			if failed != nil {
				err = failed
			}
			add(set.Secrets)
		}
	}
	list.Secrets = []SecretCheck{}
	for _, k := range slices.SortedFunc(maps.Keys(all), func(a, b key) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.from, b.from)) }) {
		list.Secrets = append(list.Secrets, e.secret(ctx, k.name, all[k], true))
	}
	return list, err
}

// login returns a login as a secret.
func (e *Engine) login(ctx context.Context, l login.Login, check bool) SecretCheck {
	c := SecretCheck{Name: "login " + l.Provider, Reference: l.Path()}
	if p, err := login.Find(l.Provider); err == nil {
		for _, host := range p.Hosts {
			c.To = append(c.To, config.Host(host))
		}
	}
	if check {
		grant, err := l.Grant(ctx, secret.Value{})
		e.Redact.Add(grant.Access)
		ok := err == nil
		if c.OK = &ok; !ok {
			c.Error, c.Hint = err.Error(), "agent-sessionizer login "+l.Provider
		}
	}
	return c
}

func (e *Engine) secret(ctx context.Context, name string, s config.Secret, check bool) SecretCheck {
	c := SecretCheck{Name: name, Reference: s.From}
	ref, err := secret.ParseRef(name, s.From)
	if err == nil {
		s, err = e.sessions().Config.Bound(name, s)
		c.Binding = s.Binding
	}
	if err == nil && check {
		var values map[string]secret.Value
		values, err = secret.ResolveInChild(ctx, e.sessions().Self, []secret.Ref{ref})
		e.Redact.Add(slices.Collect(maps.Values(values))...)
		e.audit(ctx, audit.Record{
			Type: audit.SecretAccessed, Actor: e.Caller.Name, Resource: "secret:" + name, Outcome: audit.OutcomeOf(err),
			Details: map[string]any{"for": "secrets check"},
		})
		c.Warning = strings.Join(secret.Warnings([]secret.Ref{ref}), "; ")
	}
	if err != nil {
		c.Error, c.Hint = err.Error(), fail.HintOf(err)
	}
	if ok := err == nil; check || !ok {
		c.OK = &ok
	}
	return c
}
