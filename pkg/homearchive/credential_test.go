package homearchive

import (
	"strings"
	"testing"
)

func TestCredential(t *testing.T) {
	const key = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----\n"
	for name, content := range map[string]string{
		".ssh/id_ed25519": "", ".ssh/id_rsa_work": "", ".ssh/authorized_keys": "", ".ssh/authorized_keys2": "", "stow/ssh/.ssh/id_rsa": "",
		".ssh/deploy": key, "anywhere": "comment\n" + key, "ec": "-----BEGIN EC PRIVATE KEY-----", "pkcs8": "  -----BEGIN PRIVATE KEY-----\r\n",
		"pgp.asc": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n", "age": "# created\nAGE-SECRET-KEY-1QQQ\n", "putty.ppk": "PuTTY-User-Key-File-3: ssh-ed25519",
		".aws/credentials": "", ".aws/sso/cache/0123.json": "", ".netrc": "", ".git-credentials": "", ".config/gh/hosts.yml": "",
		".docker/config.json": `{"auths": {"ghcr.io": {"auth": "dXNlcjpwYXNz"}}}`, ".npmrc": "//registry.example.org/:_authToken=npm_x\n",
		".yarnrc.yml": "npmAuthToken: abc\n", ".claude/.credentials.json": "", ".codex/auth.json": "", ".claude.json": `{"primaryApiKey": "sk"}`,
		".gitconfig": "[url \"https://me:hunter2@example.org/\"]\n", ".kube/config": "users:\n- user:\n    client-key-data: QQ==\n",
		".ssh/identity": "", ".gnupg/private-keys-v1.d/x.key": "", ".gnupg/secring.gpg": "", ".azure/msal_token_cache.json": "", "_netrc": "",
		".config/gcloud/application_default_credentials.json": "", ".config/gcloud/access_tokens.db": "", ".config/git/credentials": "",
		".config/glab-cli/config.yml": "", ".config/hub": "", ".config/op/config": "", ".config/github-copilot/apps.json": "",
		".config/containers/auth.json": "", ".cargo/credentials": "", ".cargo/credentials.toml": "", ".gem/credentials": "", ".pgpass": "",
		".vault-token": "", ".terraform.d/credentials.tfrc.json": "", ".gemini/oauth_creds.json": "", ".local/share/opencode/auth.json": "",
		".pypirc": "[pypi]\npassword = x\n", ".my.cnf": "[client]\npassword=x\n", ".codex/config.toml": `bearer_token = "x"`,
		".claude/settings.json": `{"env": {"ANTHROPIC_API_KEY": "sk"}}`, ".config/git/config": "[http]\n\textraHeader = \"Authorization: Bearer x\"",
	} {
		if got := Credential(name, []byte(content)); got == "" {
			t.Errorf("Credential(%q, %q) = %q, want a reason", name, content, got)
		}
	}
	for name, content := range map[string]string{
		".ssh/config": "Host *", ".ssh/id_ed25519.pub": "ssh-ed25519 AAAA me@example.invalid", ".ssh/known_hosts": "", ".aws/config": "[default]",
		".gitconfig": "[user]\n\temail = me@example.org\n[url \"git@github.com:\"]\n\tinsteadOf = https://github.com/\n",
		".npmrc":     "prefix=~/.local\n//registry.example.org/:_authToken=${NPM_TOKEN}\n; _authToken=x\n", ".config/gh/config.yml": "git_protocol: https",
		".docker/config.json": `{"auths": {"ghcr.io": {}}, "credsStore": "osxkeychain"}`, ".netrc.example": "", "netrc": "", ".claude.json": `{"projects": {}}`,
		".claude/settings.json": `{"env": {"ANTHROPIC_API_KEY": "$KEY"}}`, ".kube/config": "users:\n- user:\n    exec: {command: aws}\n",
		".claude/projects/x/1.jsonl": `{"text":"it begins with -----BEGIN PRIVATE KEY-----\nand so on"}`, ".zshrc": "# see .netrc and BEGIN PRIVATE KEY",
		".pypirc": "[pypi]\nusername = x\n", ".my.cnf": "[client]\nuser=x\n", ".codex/config.toml": `bearer_token = ""`, ".yarnrc.yml": "npmAuthToken: $X\n",
		"cert.pem": "-----BEGIN CERTIFICATE-----", "pub.pem": "-----BEGIN PUBLIC KEY-----",
	} {
		if why := Credential(name, []byte(content)); why != "" {
			t.Errorf("Credential(%q, %q) = %q, want none", name, content, why)
		}
	}
}

func TestToken(t *testing.T) {
	for _, prefix := range []string{"ghp_", "github_pat_", "glpat-", "npm_", "sk-ant-", "xoxb-", "AIza"} {
		text := "export TOKEN=" + prefix + strings.Repeat("a1", 30) + "\n"
		if prefix == "npm_" || prefix == "ghp_" {
			text = "export TOKEN='" + prefix + strings.Repeat("a1", 18) + "'\n"
		}
		if !Token([]byte(text)) {
			t.Errorf("Token(%q) = false, want true", text)
		}
	}
	for _, text := range []string{"export TOKEN=$(pass show x)", "ghp_", "alias npm_install='npm install'", "sk-ant-", "AIza is a prefix"} {
		if Token([]byte(text)) {
			t.Errorf("Token(%q) = true, want false", text)
		}
	}
}

func TestCheckPattern(t *testing.T) {
	for _, p := range append(Agents(), ".zsh_history", ".claude*", ".config/*/x?", ".ssh", "dir with blanks/[ab]", ".ssh/id_rsa.pub") {
		if err := CheckPattern(p); err != nil {
			t.Errorf("CheckPattern(%q): error %v, want nil", p, err)
		}
	}
	if err := CheckPattern(strings.Repeat("a", 255)); err != nil {
		t.Errorf("CheckPattern of 255 bytes: error %v, want nil", err)
	}
	for p, want := range map[string]string{
		"a/" + strings.Repeat("b", 255): "longer than 256 bytes", "[a": "without a matching ]", "/a": "relative to the guest's home", "~a": "relative to the guest's home",
		"a\rb": "must be a path below", ".netrc": "it contains a login and is never saved", ".ssh/id_x": "it is a private key and is never saved",
	} {
		if err := CheckPattern(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("CheckPattern(%.20q): error %v, want %q", p, err, want)
		}
	}
	if err := CheckPattern("a/" + strings.Repeat("b", 254)); err != nil {
		t.Errorf("CheckPattern of 256 bytes: error %v, want nil", err)
	}
	for _, p := range []string{
		"", ".", "..", "/etc", "~/.x", "~", "../x", "a/../b", "a//b", "a/", "[a", "a\nb", "a\x00", strings.Repeat("a", 300),
		".netrc", ".aws/credentials", ".ssh/id_rsa", ".claude/.credentials.json", ".codex/auth.json", ".ssh/authorized_keys",
	} {
		if CheckPattern(p) == nil {
			t.Errorf("CheckPattern(%q) succeeded, want an error", p)
		}
	}
}

func TestMatch(t *testing.T) {
	ps := Patterns{".claude/projects", ".config/*/keep.*", ".zsh_history"}
	for name, want := range map[string][2]bool{
		".claude": {false, true}, ".claude/projects": {true, true}, ".claude/projects/a/b": {true, true}, ".claude/projectsx": {},
		".config": {false, true}, ".config/x": {false, true}, ".config/x/keep.me": {true, true}, ".config/x/keep.d/f": {true, true}, ".config/x/other": {},
		".zsh_history": {true, true}, ".zsh_history.new": {}, "sub/.zsh_history": {}, "sub": {},
	} {
		if meant, below := ps.match(name); meant != want[0] || below != want[1] {
			t.Errorf("match(%q) = %t, %t, want %t, %t", name, meant, below, want[0], want[1])
		}
	}
}
