package tmux_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// tool returns a program in a directory whose name has characters that are special in
// tmux and shells. The program writes its arguments to a file, and its directory if
// it has one.
func tool(t *testing.T) (path, told string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), `it's; 100% #{pid} #S "$HOME"`)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path, told = filepath.Join(dir, "tool"), filepath.Join(t.TempDir(), "told")
	script := "#!/bin/sh\n{ echo \"$@\"; pwd; } >'" + told + ".new'; mv '" + told + ".new' '" + told + "'; [ \"$1\" = next ] || { echo popup of \"$2\"; read x; }\n"
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path, told
}

func (s *server) client(session string) string {
	s.t.Helper()
	return strings.TrimSpace(s.tmux("list-clients", "-t", session, "-F", "#{client_name}"))
}

// The keys work in the user's sessions and in ours, for the client in which they are
// pressed, whatever the program and the directory are called.
func TestBind(t *testing.T) {
	s := newServer(t, "set -s escape-time 0\nset -g assume-paste-time 0\n")
	if _, err := s.Client.New(t.Context(), tmux.Session{Name: "guest-1", Key: "k", Command: showKeys()}); err != nil {
		t.Fatal(err)
	}
	mine, guest := s.attach("users-own"), s.attach("guest-1")
	eventually(t, "guest", "ready", guest.show)

	// Unbound keys go to the guest.
	guest.keys("M-p", "M-n", "M-P", "x")
	eventually(t, "keys that are not bound", "^[p^[n^[Px", guest.show)

	path, told := tool(t)
	b := tmux.Bindings{Pick: []string{path}, Next: []string{path, "next"}}
	for range 2 { // idempotent
		if err := s.Client.Bind(t.Context(), b, false); err != nil {
			t.Fatal(err)
		}
	}
	// Attaching sets up our keys again.
	if _, err := s.Client.New(t.Context(), tmux.Session{Name: "guest-1", Key: "k", Command: showKeys()}); err != nil {
		t.Fatal(err)
	}
	// A directory's name may be anything and must not be run as a command.
	where := filepath.Join(t.TempDir(), "x\nrun-shell 'touch pwned' #(touch pwned) ; run-shell 'touch pwned'")
	if err := os.Mkdir(where, 0o700); err != nil {
		t.Fatal(err)
	}
	s.tmux("respawn-pane", "-k", "-c", strings.ReplaceAll(where, "#", "##"), "-t", "users-own", "sh")
	eventually(t, "the pane's directory", filepath.Base(where), func() string {
		return s.tmux("display-message", "-p", "-t", "users-own", "#{pane_current_path}")
	})
	for _, c := range []struct {
		term   screen
		client string
	}{{mine, s.client("users-own")}, {guest, s.client("guest-1")}} {
		for _, key := range []string{"M-p", "M-P"} {
			c.term.keys(key)
			eventually(t, "popup", "popup of "+c.client, c.term.show)
			b, _ := os.ReadFile(told)
			if !strings.HasPrefix(string(b), "--client "+c.client+"\n") {
				t.Errorf("arguments = %q, want --client %s", b, c.client)
			}
			if c.term == mine && !strings.HasSuffix(string(b), "\n"+where+"\n") {
				t.Errorf("arguments = %q, want the pane's directory %s", b, where)
			}
			if err := os.Remove(told); err != nil {
				t.Fatal(err)
			}
			c.term.keys("Enter") // the popup closes with the program
			eventually(t, "no popup", "gone", func() string {
				if strings.Contains(c.term.show(), "popup of") {
					return ""
				}
				return "gone"
			})
		}
		c.term.keys("M-n")
		eventually(t, "next", "next --client "+c.client, func() string { b, _ := os.ReadFile(told); return string(b) })
		if err := os.Remove(told); err != nil {
			t.Fatal(err)
		}
	}

	if found, _ := filepath.Glob("pwned"); len(found) > 0 {
		_ = os.Remove("pwned")
		t.Error("name of the directory was run as a command, want it quoted") // in the directory where the server was started
	}

	if err := s.Client.Unbind(t.Context()); err != nil {
		t.Fatal(err)
	}
	guest.keys("M-p", "M-n", "y")
	eventually(t, "keys that are unbound", "x^[p^[ny", guest.show)
	if keys := s.tmux("list-keys", "-T", "root"); strings.Contains(keys, "@agent") {
		t.Errorf("root keys after Unbind = %s, want none of ours", keys)
	}
	if left := s.tmux("show-options", "-g"); strings.Contains(left, path) {
		t.Errorf("options after Unbind = %s, want no %s", left, path)
	}
	if err := s.Client.Unbind(t.Context()); err != nil {
		t.Errorf("second Unbind = %v, want nil", err)
	}
}

// A user's bindings are replaced only on request, and unbinding never removes them.
func TestBindAsks(t *testing.T) {
	s := newServer(t, "bind -n M-p display-message 'my own; key'\nbind -n M-n next-window\nbind -n M-x display-message other\n")
	b := tmux.Bindings{Pick: []string{"/bin/echo"}, Next: []string{"/bin/echo", "next"}}
	before := s.tmux("list-keys", "-T", "root")
	err := s.Client.Bind(t.Context(), b, false)
	if fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "M-p display-message") || !strings.Contains(err.Error(), "M-n next-window") ||
		!strings.Contains(fail.HintOf(err), "--force") {
		t.Errorf("Bind over the user's keys = %v (code %v, hint %q), want code %v with both keys, hint --force", err, fail.CodeOf(err), fail.HintOf(err), fail.Conflict)
	}
	if err := s.Client.Unbind(t.Context()); err != nil {
		t.Error(err)
	}
	if now := s.tmux("list-keys", "-T", "root"); now != before {
		t.Errorf("root keys after a refused Bind = %s, want %s", now, before)
	}
	if err := s.Client.Bind(t.Context(), b, true); err != nil {
		t.Fatal(err)
	}
	if now := s.tmux("list-keys", "-T", "root"); strings.Contains(now, "my own") || !strings.Contains(now, "M-x") {
		t.Errorf("root keys with force = %s, want ours in place of the user's", now)
	}
	none := tmux.Client{Socket: filepath.Join(t.TempDir(), "none")}
	if err := none.Bind(t.Context(), b, false); fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" {
		t.Errorf("Bind without a server = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.NotFound)
	}
	if err := none.Unbind(t.Context()); err != nil {
		t.Errorf("Unbind without a server = %v, want nil", err)
	}
}

// The lines for a tmux.conf have the same effect as Bind.
func TestBindLines(t *testing.T) {
	path, told := tool(t)
	b := tmux.Bindings{Pick: []string{path}, Next: []string{path, "next"}}
	s := newServer(t, "set -s escape-time 0\nset -g assume-paste-time 0\n"+strings.Join(b.Lines(), "\n")+"\n")
	look := func() string {
		return s.tmux("list-keys", "-T", "root") + s.tmux("show-options", "-g")
	}
	sourced := look()
	if err := s.Client.Bind(t.Context(), b, false); err != nil {
		t.Fatal(err)
	}
	if bound := look(); bound != sourced {
		t.Errorf("keys of Bind = %s, want %s as of the printed lines", bound, sourced)
	}
	term := s.attach("users-own")
	term.keys("M-P")
	eventually(t, "popup", "popup of "+s.client("users-own"), term.show)
	term.keys("Enter")
	eventually(t, "arguments", "--client", func() string { b, _ := os.ReadFile(told); return string(b) })
}
