//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// ownFiles are dotfiles that replace all of the image's own. The other parts of the
// test must work with them.
var ownFiles = map[string]string{
	".zshenv": "export OWN_ZSHENV=1\n", ".zshrc": "PROMPT='own %m> '\n", ".bashrc": "export OWN_BASHRC=1\n", ".vimrc": "set number\n",
	".gitconfig": "[user]\n\tname = Me\n\temail = me@example.invalid\n", ".tmux.conf": "set -g status-right own\n",
	".config/tool/conf": "one\n", "odd \xff\nname": "odd\n", ".netrc": "machine example.org password hunter2\n",
}

func (b *box) dotfile(name, text string) {
	b.t.Helper()
	b.Write(".config/agent-sessionizer/dotfiles/"+name, text)
}

// dotfiles checks those copied when the session was created.
func dotfiles(t *testing.T, b *box, name string) {
	if got := b.MustIn(name, "cd; cat .config/tool/conf; git config user.email; zsh -c 'echo $OWN_ZSHENV'; ls -d .netrc 2>/dev/null || echo none; stat -c %U:%a .zshrc"); got != "one\nme@example.invalid\n1\nnone\nagent:600" {
		t.Errorf("dotfiles: %q", got)
	}
	if got := b.MustIn(name, `cd; cat "$(printf 'odd \377\nname')"`); got != "odd" {
		t.Errorf("an odd name: %q", got)
	}
	if log := b.Asz("logs", name); !strings.Contains(log, ".netrc: contains a login") || strings.Contains(log, "hunter2") {
		t.Errorf("nothing is said of the credential: %s", log)
	}
	b.MustIn(name, "cd; echo changed in the guest >.vimrc; rm .config/tool/conf")
	b.dotfile(".zshrc", "PROMPT='newer %m> '\n")
	b.dotfile(".vimrc", "set nonumber\n")
	b.dotfile(".config/tool/conf", "two\n")
	b.dotfile(".config/tool/new", "new\n")
}

// dotfilesAfterRestart checks for changed dotfiles.
func dotfilesAfterRestart(t *testing.T, b *box, name string) {
	t.Helper()
	got := b.MustIn(name, "cd; cat .zshrc .vimrc .config/tool/new; ls .config/tool")
	if want := "PROMPT='newer %m> '\nchanged in the guest\nnew\nnew"; got != want {
		t.Errorf("after a restart: %q, want %q", got, want)
	}
}

// keep leaves files that the next session of the repository gets, and some that it
// must not get.
func keep(b *box, name string) {
	b.MustIn(name, `cd && mkdir -p .claude/projects/p .codex/sessions && umask 077 &&
		printf '{"text":"%s"}\n' "$SENTINEL" >.claude/projects/p/1.jsonl && echo codex >.codex/sessions/1 && echo login >.claude/.credentials.json &&
		echo login >.codex/auth.json && echo 'make test' >.zsh_history && touch -d @1000000000 .zsh_history`)
}

// keptAfterDestroy creates a session of the repository again, and destroys it.
func keptAfterDestroy(t *testing.T, b *box, sentinel, clone string) {
	files, err := filepath.Glob(filepath.Join(b.Home, ".local/state/agent-sessionizer/kept/*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("kept: %q %v", files, err)
	}
	if text, err := os.ReadFile(files[0]); err != nil || !strings.Contains(string(text), strings.Repeat("*", len(sentinel))) || strings.Contains(string(text), sentinel) {
		t.Errorf("the secret is not masked in what is kept: %v", err)
	}
	name := b.open("./" + filepath.Base(clone))
	got := b.MustIn(name, "cd; cat .claude/projects/p/1.jsonl .codex/sessions/1 .zsh_history; stat -c %a:%Y:%U .zsh_history; ls .claude/.credentials.json .codex/auth.json 2>/dev/null || echo none")
	want := `{"text":"` + strings.Repeat("*", len(sentinel)) + "\"}\ncodex\nmake test\n600:1000000000:agent\nnone"
	if got != want {
		t.Errorf("in the next session: %q, want %q", got, want)
	}
	if got := b.MustIn(name, "cd; cat .zshrc"); got != "PROMPT='newer %m> '" {
		t.Errorf("the next session's dotfiles: %q", got)
	}
	other := b.Repo("other")
	elsewhere := b.open("./" + filepath.Base(other))
	if got := b.MustIn(elsewhere, "cd; ls .claude/projects/p .codex/sessions/1 2>/dev/null || echo none"); got != "none" {
		t.Errorf("another repository's session has %q", got)
	}
	b.Asz("destroy", "--force", name, elsewhere)
	b.Asz("kept", "rm", clone) // nothing is saved for the other one
	if got := b.Asz("kept", "--json"); strings.TrimSpace(got) != "[]" {
		t.Errorf("still kept: %s", got)
	}
}
