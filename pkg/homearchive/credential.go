package homearchive

import (
	"bytes"
	"path"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// credentialPlace describes where a program keeps its credentials. A pattern is compared with the
// end of a name, part by part, so that it matches below any directory.
type credentialPlace struct {
	pattern string
	except  string             // pattern of files that are not credentials after all
	holds   *lazyregexp.Regexp // nil: any content
	why     string
}

const containsLogin = "contains a login"

var credentialPlaces = []credentialPlace{
	{pattern: ".ssh/authorized_keys*", why: "controls who may log in"},
	{pattern: ".ssh/id_*", except: "*.pub", why: "is a private key"},
	{pattern: ".ssh/identity", why: "is a private key"},
	{pattern: ".gnupg/private-keys-v1.d/*", why: "is a private key"},
	{pattern: ".gnupg/secring.gpg", why: "is a private key"},
	{pattern: ".aws/credentials", why: containsLogin},
	{pattern: ".aws/*/cache/*", why: containsLogin},
	{pattern: ".azure/*token*", why: containsLogin},
	{pattern: ".config/gcloud/*credentials*", why: containsLogin},
	{pattern: ".config/gcloud/access_tokens.db", why: containsLogin},
	{pattern: ".netrc", why: containsLogin},
	{pattern: "_netrc", why: containsLogin},
	{pattern: ".git-credentials", why: containsLogin},
	{pattern: ".config/git/credentials", why: containsLogin},
	{pattern: ".config/gh/hosts.yml", why: containsLogin},
	{pattern: ".config/glab-cli/config.yml", why: containsLogin},
	{pattern: ".config/hub", why: containsLogin},
	{pattern: ".config/op/config", why: containsLogin},
	{pattern: ".config/github-copilot/*.json", why: containsLogin},
	{pattern: ".config/containers/auth.json", why: containsLogin},
	{pattern: ".cargo/credentials", why: containsLogin},
	{pattern: ".cargo/credentials.toml", why: containsLogin},
	{pattern: ".gem/credentials", why: containsLogin},
	{pattern: ".pgpass", why: containsLogin},
	{pattern: ".vault-token", why: containsLogin},
	{pattern: ".terraform.d/credentials.tfrc.json", why: containsLogin},
	{pattern: ".claude/.credentials.json", why: containsLogin},
	{pattern: ".codex/auth.json", why: containsLogin},
	{pattern: ".gemini/oauth_creds.json", why: containsLogin},
	{pattern: ".local/share/opencode/auth.json", why: containsLogin},
	// These files count only if they contain a value, not a reference such as
	// "${TOKEN}".
	{pattern: ".docker/config.json", holds: lazyregexp.New(`"(auth|identitytoken|registrytoken|password)"\s*:\s*"[^"]`), why: containsLogin},
	{pattern: ".npmrc", holds: lazyregexp.New(`(?m)^[^#;\n]*(_authToken|_auth|_password)\s*=\s*["']?[^\s"'$]`), why: containsLogin},
	{pattern: ".yarnrc.yml", holds: lazyregexp.New(`npmAuth(Token|Ident)["']?\s*:\s*["']?[^\s"'$]`), why: containsLogin},
	{pattern: ".pypirc", holds: lazyregexp.New(`(?m)^\s*password\s*[=:]\s*\S`), why: containsLogin},
	{pattern: ".my.cnf", holds: lazyregexp.New(`(?m)^\s*password\s*=\s*\S`), why: containsLogin},
	{pattern: ".kube/config", holds: lazyregexp.New(`client-key-data|(?m)^\s*-?\s*(token|password)\s*:\s*\S`), why: containsLogin},
	{pattern: ".gitconfig", holds: gitLogin, why: containsLogin},
	{pattern: ".config/git/config", holds: gitLogin, why: containsLogin},
	{pattern: ".claude.json", holds: lazyregexp.New(`"(primaryApiKey|accessToken|refreshToken)"\s*:\s*"[^"]`), why: containsLogin},
	{pattern: ".claude/settings*.json", holds: lazyregexp.New(`"ANTHROPIC_(API_KEY|AUTH_TOKEN)"\s*:\s*"[^"$]`), why: containsLogin},
	{pattern: ".codex/config.toml", holds: lazyregexp.New(`bearer_token\s*=\s*["'][^"']`), why: containsLogin},
}

var (
	gitLogin = lazyregexp.New(`://[^/\s:@"]*:[^/\s@"$]+@|(?i)extraheader\s*=\s*"?\s*authorization`)
	// Only at the start of a line, because a key that is quoted in a transcript does
	// not count.
	privateKey = lazyregexp.New(`(?m)^\s*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-|AGE-SECRET-KEY-1)`)
	// Token formats that their issuers designed to be recognizable.
	token = lazyregexp.New(`\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40}|glpat-[A-Za-z0-9_-]{20}|npm_[A-Za-z0-9]{36}|` +
		`sk-ant-[A-Za-z0-9_-]{24}|sk-proj-[A-Za-z0-9_-]{24}|xox[abprs]-[A-Za-z0-9-]{24}|hv[sb]\.[A-Za-z0-9_-]{24}|AIza[A-Za-z0-9_-]{35}|dop_v1_[a-f0-9]{64})`)
)

// Credential returns why a file is taken for a credential, or "" if it is not. It knows
// where the usual programs keep their credentials, and what private keys look like. It
// catches accidents; it does not stop a user who hides a credential on purpose.
func Credential(name string, content []byte) (why string) {
	for _, p := range credentialPlaces {
		if matchesEnd(p.pattern, name) && (p.holds == nil || p.holds.Match(content)) &&
			(p.except == "" || !matchesEnd(p.except, name)) {
			return p.why
		}
	}
	for _, mark := range []string{"PRIVATE KEY", "PuTTY-User-Key", "AGE-SECRET-KEY"} { // cheap check first: transcripts are long and the expression is slow
		if bytes.Contains(content, []byte(mark)) && privateKey.Match(content) {
			return "contains a private key"
		}
	}
	return ""
}

// Token reports whether a settings file contains a token. It is not meant for
// transcripts, which may mention tokens.
func Token(content []byte) bool { return token.Match(content) }

// matchesEnd compares a pattern with the same number of parts at the end of name.
func matchesEnd(pattern, name string) bool {
	parts := strings.Split(name, "/")
	n := strings.Count(pattern, "/") + 1
	if len(parts) < n {
		return false
	}
	ok, err := path.Match(pattern, strings.Join(parts[len(parts)-n:], "/"))
	return ok && err == nil
}
