package ops

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// SecretCheck is a secret's reference and, after a check, its result. It never has the value.
type SecretCheck struct {
	Name      string `json:"name"`
	Reference string `json:"reference"`
	OK        *bool  `json:"ok,omitempty"`
	Error     string `json:"error,omitempty"`
	Warning   string `json:"warning,omitempty"`
	Hint      string `json:"hint,omitempty"`
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
)

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
	return list, nil
}

func (e *Engine) secret(ctx context.Context, name, reference string, check bool) SecretCheck {
	c := SecretCheck{Name: name, Reference: reference}
	ref, err := secret.ParseRef(name, reference)
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
