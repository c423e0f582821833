package session

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
)

// instead lists the variables of secrets that a client uses instead of a login.
var instead = map[string][]string{
	"claude": {"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"},
	"codex":  {"OPENAI_API_KEY", "CODEX_API_KEY"},
}

// loginSecret returns the name of a login among the gateway's secrets. No variable has such a name.
func loginSecret(name string) string { return "login " + name }

// Logins returns the logins of this host that a session with these settings uses, without those
// that it has a secret for.
func Logins(paths config.Paths, names config.Logins, secrets map[string]config.Secret) []login.Login {
	home, err := os.UserHomeDir()
	if err != nil {
		return nil
	}
	var all []login.Login
	for _, p := range login.Providers() {
		l := login.At(p, paths.Logins(), home)
		has := func(variable string) bool { _, ok := secrets[variable]; return ok }
		if is, _ := l.Exists(); is && slices.Contains(names, config.LoginName(p.Name)) && !slices.ContainsFunc(instead[p.Name], has) {
			all = append(all, l)
		}
	}
	return all
}

// loginSecrets returns what the gateway gets of logins.
func loginSecrets(logins []login.Login) []gateway.Secret {
	var all []gateway.Secret
	for i, l := range logins {
		p, err := login.Find(l.Provider)
		if err != nil {
			continue // another version's
		}
		like := "sk-ant-oat01-"
		if l.Provider == login.Codex.Name {
			like = unsigned(codexClaims(l)) + "."
		}
		all = append(all, gateway.Secret{Name: loginSecret(l.Provider), Like: like, Hosts: p.Hosts, Login: &logins[i]})
	}
	return all
}

// placeholderEnd is when the clients believe that their placeholders end. It is always the same: a part of
// Codex's placeholders is made from it, and they must not change while Codex runs.
var placeholderEnd = time.Date(2099, time.January, 1, 0, 0, 0, 0, time.UTC)

// loginFile returns the file that the client of a login reads in the guest, with placeholders.
func loginFile(l login.Login, placeholders map[string]string) (path string, text []byte, err error) {
	access, refresh := placeholders[loginSecret(l.Provider)], placeholders[gateway.RefreshName(loginSecret(l.Provider))]
	account := l.Account()
	if l.Provider == login.Claude.Name {
		scopes := account.Scopes
		if len(scopes) == 0 {
			scopes = []string{"user:inference", "user:profile"}
		}
		text, err = json.Marshal(map[string]any{"claudeAiOauth": map[string]any{
			"accessToken": access, "refreshToken": refresh, "expiresAt": placeholderEnd.UnixMilli(),
			"scopes": scopes, "subscriptionType": account.Plan, "rateLimitTier": account.Tier,
		}})
		return guestclient.Home + "/.claude/.credentials.json", text, err
	}
	text, err = json.Marshal(map[string]any{
		"auth_mode": "chatgpt", "OPENAI_API_KEY": nil, "last_refresh": time.Now().UTC(),
		"tokens": map[string]any{
			"id_token": unsigned(codexClaims(l)) + ".e30", "access_token": access, "refresh_token": refresh, "account_id": account.ID,
		},
	})
	return guestclient.Home + "/.codex/auth.json", text, err
}

// codexClaims returns the claims that Codex reads from its tokens.
func codexClaims(l login.Login) map[string]any {
	account := l.Account()
	return map[string]any{
		"exp": placeholderEnd.Unix(), "email": "user@localhost",
		"https://api.openai.com/auth": map[string]any{"chatgpt_account_id": account.ID, "chatgpt_plan_type": account.Plan},
	}
}

// unsigned returns a JSON Web Token without its signature.
func unsigned(claims map[string]any) string {
	encode := func(v any) string {
		text, _ := json.Marshal(v) // claims can be encoded
		return base64.RawURLEncoding.EncodeToString(text)
	}
	return encode(map[string]string{"alg": "none", "typ": "JWT"}) + "." + encode(claims)
}

// deliverLogins puts the files of the logins into the guest, and removes those of logins that the
// session had before.
func (x Secrets) deliverLogins(ctx context.Context, s Session, g guestclient.Guest, logins []login.Login, placeholders map[string]string) error {
	files := map[string][]byte{}
	for _, p := range login.Providers() {
		path, _, _ := loginFile(login.Login{Provider: p.Name}, nil)
		if slices.Contains(s.Status.Logins, p.Name) {
			files[path] = nil
		}
	}
	for _, l := range logins {
		path, text, err := loginFile(l, placeholders)
		if err != nil {
			return fmt.Errorf("encode a login: %w", err)
		}
		files[path] = text
	}
	for path, text := range files {
		if err := g.SetLogin(ctx, path, gateway.RefreshMark, text); err != nil {
			return err
		}
	}
	return nil
}
