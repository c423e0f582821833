package ops

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// PullToken returns the token with which this host opens a pull request for a session's repository: that of the
// environment, as gh takes it, or for github.com the secret of the settings that guests get a placeholder for. It
// is empty if the user has none. The value never leaves this process but for the API.
func (e *Engine) PullToken(ctx context.Context, s session.View, host string) (secret.Value, error) {
	if token := review.EnvToken(host); token.Reveal() != "" {
		e.Redact.Add(token)
		return token, nil
	}
	if host != "github.com" {
		return secret.Value{}, nil
	}
	key, _ := config.ParseRepoKey(s.RepoKey) // a directory has only the settings for all repositories
	set, err := e.sessions().Config.For(key, s.Profile)
	if err != nil {
		return secret.Value{}, err
	}
	for _, name := range []string{"GH_TOKEN", "GITHUB_TOKEN"} {
		from, ok := set.Secrets[name]
		if !ok {
			continue
		}
		ref, err := secret.ParseRef(name, from.From)
		if err != nil {
			return secret.Value{}, err
		}
		values, err := secret.ResolveInChild(ctx, e.sessions().Self, []secret.Ref{ref})
		e.Redact.Add(values[name])
		e.audit(ctx, audit.Record{
			Type: audit.SecretAccessed, Actor: e.Caller.Name, Resource: "secret:" + name, Outcome: audit.OutcomeOf(err),
			Details: map[string]any{"for": "pull request", "session": s.ID},
		})
		return values[name], err
	}
	return secret.Value{}, nil
}
