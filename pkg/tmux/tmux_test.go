package tmux_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// server is a private tmux server, without the user's configuration.
type server struct {
	t      *testing.T
	Client tmux.Client
}

func newServer(t *testing.T, config string) *server {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("tmux is needed: apt install tmux")
	}
	t.Setenv("TMUX", "")
	dir := testenv.ShortDir(t)
	if err := os.WriteFile(filepath.Join(dir, "conf"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, Client: tmux.Client{Socket: filepath.Join(dir, "sock")}}
	cmd := exec.Command("tmux", "-S", s.Client.Socket, "-f", filepath.Join(dir, "conf"), "new-session", "-d", "-x", "100", "-y", "30", "-s", "users-own", "sh")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("start tmux: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", s.Client.Socket, "kill-server").Run() })
	return s
}

func (s *server) tmux(args ...string) string {
	s.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-S", s.Client.Socket}, args...)...).CombinedOutput()
	if err != nil {
		s.t.Fatalf("tmux %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// eventually waits until what f returns contains want.
func eventually(t *testing.T, what, want string, f func() string) {
	t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		got := f()
		if strings.Contains(got, want) {
			return
		}
		select {
		case <-deadline.C:
			t.Fatalf("%s = %s, want %q in it", what, got, want)
		case <-tick.C:
		}
	}
}

func TestSessionLife(t *testing.T) {
	s := newServer(t, "")
	dir := t.TempDir()
	mark := filepath.Join(dir, "mark; it's $HOME #{session_name}")
	sess := tmux.Session{
		Name: tmux.SlugName("owner/re.po:x", "id1"), Key: "agent-owner-repo-1", Env: map[string]string{"WHERE": "a;b;"},
		Command: []string{"sh", "-c", `printf %s "$1 $WHERE" >"$1"; exec cat`, "-", mark},
	}
	for range 2 { // idempotent
		if _, err := s.Client.New(t.Context(), sess); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "arguments and environment", mark+" a;b;", func() string { b, _ := os.ReadFile(mark); return string(b) })
	server, err := s.Client.ReadState(t.Context())
	if list := server.Sessions; err != nil || len(list) != 1 || list[0] != (tmux.Info{Name: sess.Name, Key: sess.Key}) {
		t.Fatalf("sessions = %v, %v; want our session only", list, err)
	}
	if server.Socket != s.Client.Socket {
		t.Errorf("socket = %q, want %q", server.Socket, s.Client.Socket)
	}

	// Another session of that name is neither taken over nor killed.
	other := sess
	other.Name = "users-own"
	if _, err := s.Client.New(t.Context(), other); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("New over the user's session = %v, want code %v", err, fail.Conflict)
	}
	if err := s.Client.Kill(t.Context(), "users-own"); err != nil {
		t.Error(err)
	}
	// A prefix of a name is not the name.
	if err := s.Client.Kill(t.Context(), sess.Name[:5]); err != nil {
		t.Error(err)
	}
	if out := s.tmux("list-sessions", "-F", "#{session_name}"); out != sess.Name+"\nusers-own\n" {
		t.Errorf("sessions = %q, want %q", out, sess.Name+"\nusers-own\n")
	}

	for range 2 {
		if err := s.Client.Kill(t.Context(), sess.Name); err != nil {
			t.Fatal(err)
		}
	}
	if out := s.tmux("list-sessions", "-F", "#{session_name}"); out != "users-own\n" {
		t.Errorf("sessions after Kill = %q, want \"users-own\\n\"", out)
	}
}

func TestTwoAtOnceMakeOne(t *testing.T) {
	s := newServer(t, "")
	sess := tmux.Session{Name: "one-1", Key: "k", Command: []string{"cat"}}
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		wg.Go(func() { _, errs[i] = s.Client.New(t.Context(), sess) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if server, _ := s.Client.ReadState(t.Context()); len(server.Sessions) != 1 {
		t.Errorf("sessions = %v, want 1", server.Sessions)
	}
}

func TestUsersSettingsAreUntouched(t *testing.T) {
	s := newServer(t, "set -g prefix C-a\nbind -n M-x display-message hi\nset -g status-left mine\n")
	look := func() string {
		return s.tmux("show-options", "-g") + s.tmux("show-options", "-gw") + s.tmux("show-options", "-s") +
			s.tmux("list-keys", "-T", "root") + s.tmux("list-keys", "-T", "prefix") + s.tmux("show-options", "-t", "users-own")
	}
	before := look()
	if _, _, err := s.Client.Enter(t.Context(), "", tmux.Session{Name: "a-1", Key: "k", Command: []string{"cat"}, Destroy: []string{"true"}}, ""); err != nil {
		t.Fatal(err)
	}
	if after := look(); after != before {
		t.Errorf("global settings = %s, want %s", after, before)
	}
}

func TestTrouble(t *testing.T) {
	t.Setenv("TMUX", "")
	dir := t.TempDir()
	script := func(name, body string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for version, ok := range map[string]bool{
		"tmux 3.1c": false, "tmux 2.9a": false, "tmux 3.2": true, "tmux 3.3a": true, "tmux 4.0": true, "tmux 10.1": true,
		"tmux next-3.6": true, "tmux master": true, "tmux openbsd-7.0": true, "nonsense": false,
	} {
		c := tmux.Client{Bin: script("v", "echo '"+version+"'")}
		if err := c.Check(t.Context()); (err == nil) != ok || !ok && (fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "") {
			t.Errorf("Check with %s = %v (hint %q), want it accepted: %t", version, err, fail.HintOf(err), ok)
		}
	}
	missing := tmux.Client{Bin: filepath.Join(dir, "nothing")}
	if _, err := missing.New(t.Context(), tmux.Session{Name: "a", Key: "k", Command: []string{"x"}}); fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
		t.Errorf("New without tmux = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Host)
	}
	none := tmux.Client{Socket: filepath.Join(dir, "none")}
	if server, err := none.ReadState(t.Context()); err != nil || len(server.Sessions) != 0 {
		t.Errorf("Look without a server = %v, %v, want no sessions, nil", server, err)
	}
	if err := none.Kill(t.Context(), "a"); err != nil {
		t.Errorf("Kill without a server = %v, want nil", err)
	}
	if _, err := none.Attach(t.Context(), "a"); err == nil {
		t.Error("Attach without a server = nil, want an error")
	}
	for _, bad := range []tmux.Session{{}, {Name: "a:b", Key: "k", Command: []string{"x"}}, {Name: "a", Key: "k x", Command: []string{"x"}}, {Name: "a", Key: "k"}} {
		if _, err := none.New(t.Context(), bad); fail.CodeOf(err) != fail.Usage {
			t.Errorf("New(%+v) = %v, want code %v", bad, err, fail.Usage)
		}
	}
}

func TestSlugName(t *testing.T) {
	long := strings.Repeat("x", 300)
	seen := map[string]string{}
	for _, repo := range []string{"owner/repo", "owner.repo", "owner:repo", "=a", "-a", "$a", "ünï", "", "...", long, long + "y"} {
		name := tmux.SlugName(repo, "id")
		if strings.ContainsAny(name, ".: $=@%#'") || len(name) > 60 || seen[name] != "" {
			t.Errorf("SlugName(%q) = %q, want a unique name that tmux accepts", repo, name)
		}
		seen[name] = repo + "!"
	}
	if n := tmux.SlugName("owner/repo", "id"); !strings.HasPrefix(n, "owner_repo-") || n != tmux.SlugName("owner/repo", "id") || n == tmux.SlugName("owner/repo", "other") {
		t.Errorf("SlugName(owner/repo) = %q, want owner_repo-… that depends on the id alone", n)
	}
}

// screen is a terminal: a pane of another server, in which a client is attached.
type screen struct{ *server }

func (s *server) attach(name string) screen {
	s.t.Helper()
	argv, err := s.Client.Attach(s.t.Context(), name)
	if err != nil {
		s.t.Fatal(err)
	}
	clients := func() int { return strings.Count(s.tmux("list-clients", "-t", "="+name), "\n") }
	before := clients()
	term := newServer(s.t, "set -g prefix None\nset -g status off\nset -s escape-time 0\n")
	args := []string{"respawn-pane", "-k", "-t", "users-own", "--", "env", "-u", "TMUX"}
	term.tmux(append(args, argv...)...)
	eventually(s.t, "attach", fmt.Sprint(before+1), func() string { return fmt.Sprint(clients()) })
	return screen{term}
}

func (s screen) keys(keys ...string) {
	s.tmux(append([]string{"send-keys", "-t", "users-own"}, keys...)...)
}
func (s screen) show() string { return s.tmux("capture-pane", "-p", "-t", "users-own") }

// showKeys prints the bytes that reach the guest.
func showKeys() []string { return []string{"sh", "-c", "stty raw -echo; echo ready; exec cat -v"} }

// Every key except d and D reaches the guest, including those after the prefix.
func TestKeysReachTheGuest(t *testing.T) {
	for _, prefix := range []string{"C-b", "C-a", "`", `C-\\`, "M-;"} {
		t.Run(prefix, func(t *testing.T) {
			s := newServer(t, fmt.Sprintf("set -g prefix \"%s\"\nset -g prefix2 C-g\nset -s escape-time 0\nset -g assume-paste-time 0\nbind -n C-x kill-server\n", prefix))
			destroyed := filepath.Join(t.TempDir(), "destroyed it's")
			if _, err := s.Client.New(t.Context(), tmux.Session{
				Name: "guest-1", Key: "k", Command: showKeys(),
				Destroy: []string{"sh", "-c", `echo "really destroy $1?"; read answer; printf %s "$answer" >"$2"`, "-", "it's 100% #{k}", destroyed},
			}); err != nil {
				t.Fatal(err)
			}
			term := s.attach("guest-1")
			eventually(t, "guest", "ready", term.show)
			key := strings.ReplaceAll(prefix, `\\`, `\`)
			shown := map[string]string{"C-b": "^B", "C-a": "^A", "`": "`", `C-\`: `^\`, "M-;": "^[;"}[key]
			send := strings.ReplaceAll(key, "M-;", `M-\;`)

			term.keys("x", "C-x", send, "c", send, send, "C-g", "n", send, "Up", send, "D")
			eventually(t, "popup", "really destroy it's 100% #{k}?", term.show)
			term.keys("y", "Enter")
			eventually(t, "answer", "y", func() string { b, _ := os.ReadFile(destroyed); return string(b) })
			eventually(t, "keys", "x^X"+shown+"c"+shown+shown+"^Gn"+shown+"^[[A", term.show)
			eventually(t, "popup closed", "closed", func() string {
				if strings.Contains(term.show(), "really destroy") {
					return "" // it would take the next key
				}
				return "closed"
			})
			term.keys("z") // the first key table is active again
			eventually(t, "key after the popup", "^[[Az", term.show)

			term.keys(send, "d")
			eventually(t, "detach", "0", func() string {
				return s.tmux("display-message", "-p", "-t", "=guest-1:", "#{session_attached}")
			})
		})
	}
}

// A tmux in the guest works with the same prefix.
func TestGuestTmux(t *testing.T) {
	s := newServer(t, "set -s escape-time 0\nset -g assume-paste-time 0\n")
	guest := newServer(t, "set -s escape-time 0\n")
	if _, err := s.Client.New(t.Context(), tmux.Session{
		Name: "guest-1", Key: "k", Command: []string{"env", "-u", "TMUX", "tmux", "-S", guest.Client.Socket, "attach"},
	}); err != nil {
		t.Fatal(err)
	}
	term := s.attach("guest-1")
	eventually(t, "guest tmux", "users-own", term.show)
	term.keys("C-b", "c")
	eventually(t, "window in the guest", "2", func() string { return guest.tmux("display-message", "-p", "-t", "users-own", "#{session_windows}") })
	if n := strings.TrimSpace(s.tmux("display-message", "-p", "-t", "=guest-1:", "#{session_windows}")); n != "1" {
		t.Errorf("windows of the outer tmux = %s, want 1", n)
	}
	if err := s.Client.Copy(t.Context(), "guest-1", []byte("copied; text\n")); err != nil {
		t.Fatal(err)
	}
	if got := s.tmux("show-buffer"); got != "copied; text\n" {
		t.Errorf("buffer = %q, want \"copied; text\\n\"", got)
	}
}

// Inside tmux the client switches, and comes back when the session ends, even if
// another client has attached from a shell meanwhile. If no client came from inside
// tmux, the client goes back to its shell.
func TestSwitch(t *testing.T) {
	s := newServer(t, "set -s escape-time 0\n")
	if _, err := s.Client.New(t.Context(), tmux.Session{Name: "guest-1", Key: "k", Command: showKeys()}); err != nil {
		t.Fatal(err)
	}
	term := s.attach("users-own")
	pane := strings.TrimSpace(s.tmux("display-message", "-p", "-t", "=users-own:", "#{socket_path},#{pid},0 #{pane_id}"))
	env, paneID, _ := strings.Cut(pane, " ")
	t.Setenv("TMUX", env)
	t.Setenv("TMUX_PANE", paneID)
	ran := filepath.Join(t.TempDir(), "ran")
	if _, _, err := s.Client.Enter(t.Context(), "", tmux.Session{Name: "guest-1", Key: "other", Command: showKeys()}, ""); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Enter with another key = %v, want code %v", err, fail.Conflict)
	}
	if s.client("users-own") == "" {
		t.Error("Enter with another key switched the client, want no change")
	}
	_, argv, err := s.Client.Enter(t.Context(), "", tmux.Session{Name: "guest-1", Key: "k", Command: showKeys()}, "a note #(touch "+ran+") #S")
	if err != nil || argv != nil {
		t.Fatalf("Enter = %q, %v, want nil, nil", argv, err)
	}
	eventually(t, "the note as it was given", "a note #(touch", term.show) // first: it disappears
	eventually(t, "switched", "ready", term.show)
	if _, err := os.Stat(ran); err == nil {
		t.Error("command in a note was run, want it quoted")
	}
	switched := s.client("guest-1")
	t.Setenv("TMUX", "")
	s.attach("guest-1")
	if err := s.Client.Kill(t.Context(), "guest-1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "back", switched+"\n", func() string { return s.tmux("list-clients", "-t", "users-own", "-F", "#{client_name}") })

	if _, err := s.Client.New(t.Context(), tmux.Session{Name: "guest-2", Key: "k", Command: showKeys()}); err != nil {
		t.Fatal(err)
	}
	s.attach("guest-2")
	outside := s.client("guest-2")
	if err := s.Client.Kill(t.Context(), "guest-2"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "detached", "gone", func() string {
		if strings.Contains(s.tmux("list-clients", "-F", "#{client_name}"), outside+"\n") {
			return ""
		}
		return "gone"
	})
}

// A pushed status appears immediately, and unchanged text redraws no client.
func TestStatus(t *testing.T) {
	s := newServer(t, "set -s escape-time 0\nset -g status-interval 0\nset -g status-right '<#{@agent_status}>'\nset -g status-right-length 80\n")
	if changed, err := (tmux.Client{Socket: filepath.Join(t.TempDir(), "none")}).SetStatus(t.Context(), "x"); err != nil || changed {
		t.Errorf("SetStatus without a server = %t, %v, want false, nil", changed, err)
	}
	term := s.attach("users-own")
	eventually(t, "no status", "<>", term.show)
	text := "#[fg=yellow]1 blocked (" + tmux.Plain("#(touch x)#{pid};") + ")#[default] · 2 done;"
	for i, want := range []bool{true, false} {
		if changed, err := s.Client.SetStatus(t.Context(), text); err != nil || changed != want {
			t.Errorf("SetStatus %d = %t, %v, want %t", i, changed, err, want)
		}
	}
	eventually(t, "the status", "<1 blocked ((touch x){pid};) · 2 done;>", term.show)
}

// A key's command acts on the client in which the key was pressed.
func TestCurrentClient(t *testing.T) {
	s := newServer(t, "set -s escape-time 0\n")
	for _, name := range []string{"guest-1", "guest-2"} {
		if _, err := s.Client.New(t.Context(), tmux.Session{Name: name, Key: "key-" + name, Command: showKeys()}); err != nil {
			t.Fatal(err)
		}
	}
	s.attach("guest-1")
	two := s.attach("users-own")
	client := map[string]string{} // by session
	for line := range strings.Lines(s.tmux("list-clients", "-F", "#{session_name} #{client_name}")) {
		name, of, _ := strings.Cut(strings.TrimSpace(line), " ")
		client[name] = of
	}
	current := func(client, want string) {
		t.Helper()
		if server, err := s.Client.ReadState(t.Context()); err != nil || server.Current(client) != want {
			t.Errorf("Current(%q) = %q, %v, want %q", client, server.Current(client), err, want)
		}
	}
	current(client["guest-1"], "key-guest-1")
	current(client["users-own"], "")
	current("/dev/no-such", "")
	left := ""
	switches := filepath.Join(t.TempDir(), "switches")
	s.tmux("set-hook", "-g", "client-session-changed", "run-shell 'echo #{session_name} >>"+switches+"'")
	for _, to := range []string{"guest-2", "guest-3", "guest-2"} { // guest-3 is created
		note := "a note in " + to
		server, argv, err := s.Client.Enter(t.Context(), client["users-own"], tmux.Session{Name: to, Key: "key-" + to, Command: showKeys()}, note)
		if err != nil || argv != nil {
			t.Fatalf("Enter = %q, %v, want nil, nil", argv, err)
		}
		if from := server.Current(client["users-own"]); from != left {
			t.Errorf("Current in the state that Enter returned = %q, want %q, where the client was", from, left)
		}
		left = "key-" + to
		eventually(t, "the note", note, two.show)
		eventually(t, "switched", "ready", two.show)
		current(client["users-own"], left)
	}
	eventually(t, "one switch each", "guest-2\nguest-3\nguest-2\n", func() string {
		text, _ := os.ReadFile(switches)
		return string(text)
	})
	current(client["guest-1"], "key-guest-1")
	if err := s.Client.ShowMessage(t.Context(), client["users-own"], "no session #(touch x) waits"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the message", "no session #(touch x) waits", two.show)
}
