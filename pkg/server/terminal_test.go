package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const shell = "PS1='ready> ' exec sh"

// tmux starts tmux in a session's guest, with the windows first and second, and returns the
// guest's tmux as a command.
func (r *rig) tmux(id string) (do func(args ...string) string) {
	t := r.t
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("tmux is needed: apt install tmux")
	}
	r.vm(id)
	sockets := filepath.Join(r.root(id), "tmp")
	do = func(args ...string) string {
		t.Helper()
		cmd := exec.Command("tmux", append([]string{"-u", "-f", "/dev/null"}, args...)...)
		cmd.Env = append(os.Environ(), "TMUX=", "TMUX_TMPDIR="+sockets)
		text, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("tmux %v = %s, %v, want success", args, text, err)
		}
		return strings.TrimSpace(string(text))
	}
	do("new-session", "-d", "-s", "agent", "-n", "first", "-x", "90", "-y", "30", shell)
	t.Cleanup(func() { do("kill-server") })
	do("new-window", "-d", "-n", "second", shell)
	return do
}

// root returns the directory of a session's guest.
func (r *rig) root(id string) string {
	r.t.Helper()
	s, err := r.engine.Session(r.t.Context(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.Status.Root
}

// terminal opens a terminal as a browser does.
func (b *browser) terminal(ctx context.Context, query string) (*websocket.Conn, error) {
	h := http.Header{"Origin": {"http://" + b.addr}, "Cookie": {b.cookie}}
	c, resp, err := websocket.Dial(ctx, "ws://"+b.addr+"/ws/sessions/"+query, &websocket.DialOptions{HTTPHeader: h, Subprotocols: []string{socketProtocol, keyProtocol + b.key}})
	if err != nil {
		return nil, err
	}
	b.t.Cleanup(func() { _ = c.CloseNow() })
	if resp.Header.Get("Sec-Websocket-Protocol") != socketProtocol {
		b.t.Errorf("selected protocol = %q, want %s", resp.Header.Get("Sec-Websocket-Protocol"), socketProtocol)
	}
	c.SetReadLimit(1 << 20)
	return c, nil
}

// readUntil reads what a terminal shows until it contains a text.
func readUntil(ctx context.Context, t *testing.T, c *websocket.Conn, text string) string {
	t.Helper()
	var all strings.Builder
	for !strings.Contains(all.String(), text) {
		kind, data, err := c.Read(ctx)
		if err != nil {
			t.Fatalf("terminal = %q, %v, want %q", all.String(), err, text)
		}
		if kind != websocket.MessageBinary {
			t.Fatalf("message = %s, want %q in the output", data, text)
		}
		all.Write(data)
	}
	return all.String()
}

// reason reads a terminal to its end.
func reason(ctx context.Context, t *testing.T, c *websocket.Conn) string {
	t.Helper()
	for {
		kind, data, err := c.Read(ctx)
		if err != nil {
			t.Fatalf("end of the terminal = %v, want a message", err)
		}
		if kind == websocket.MessageText {
			var end TerminalEnd
			if err := json.Unmarshal(data, &end); err != nil || end.Type != "end" {
				t.Fatalf("last message = %s, %v, want an end", data, err)
			}
			if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				t.Errorf("close = %v, want a normal one", err)
			}
			return end.Reason
		}
	}
}

func TestTerminal(t *testing.T) {
	const id = "cccc11112222"
	r := newRig(t, Limits{Beat: 50 * time.Millisecond})
	r.session(id)
	tmux := r.tmux(id)
	b := r.logIn()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()

	var list ops.WindowList
	r.get(call{path: ops.SessionsPath + "/" + id + "/windows", as: ops.Read}, &list)
	if len(list.Windows) != 2 || list.Windows[1].Name != "second" || !list.Windows[0].Active || list.Windows[1].Command == "" {
		t.Fatalf("windows = %+v, want first, which is active, and second", list.Windows)
	}
	second := list.Windows[1].ID

	c, err := b.terminal(ctx, id+"/terminal?window="+strings.ReplaceAll(second, "@", "%40")+"&cols=70&rows=20")
	if err != nil {
		t.Fatal(err)
	}
	write := func(kind websocket.MessageType, text string) {
		t.Helper()
		if err := c.Write(ctx, kind, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	write(websocket.MessageBinary, "echo size $(stty size) $((40+2))\r")
	readUntil(ctx, t, c, "size 20 70 42")
	write(websocket.MessageText, `{"cols": 100, "rows": 33}`)
	// The shell sees the new size some time after tmux has.
	write(websocket.MessageBinary, "until [ \"$(stty size)\" = '33 100' ]; do sleep 0.05; done; echo resized $((1+1))\r")
	readUntil(ctx, t, c, "resized 2")

	// The user's own view keeps its window.
	if got := tmux("display-message", "-p", "-t", "agent:", "#{window_name}"); got != "first" {
		t.Errorf("window of the user's session = %s, want first", got)
	}
	// A guest must not write to the clipboard, nor set the title.
	write(websocket.MessageBinary, `printf '\033]52;c;aGVsbG8=\007\033]2;title\007\033[31mre'd'\n'`+"\r")
	if out := readUntil(ctx, t, c, "red"); strings.Contains(out, "\x1b]52") || strings.Contains(out, "\x1b]2;") {
		t.Errorf("output = %q, want no clipboard and no title", out)
	}

	// Logging out ends the terminal, and its session in tmux.
	if resp, body := b.do(call{method: http.MethodPost, path: logoutPath}); resp.StatusCode != http.StatusNoContent {
		t.Fatalf("logout = %s: %s, want 204", resp.Status, body)
	}
	if why := reason(ctx, t, c); !strings.Contains(why, "login") {
		t.Errorf("reason after the logout = %q, want the login", why)
	}
	for tmux("list-sessions", "-F", "#{session_name}") != "agent" {
		if ctx.Err() != nil {
			t.Fatal("the terminal's tmux session remains, want it ended")
		}
	}
	if windows := tmux("list-windows", "-a"); strings.Count(windows, "\n") != 1 {
		t.Errorf("windows afterwards = %s, want both", windows)
	}
}

func TestTerminalEnds(t *testing.T) {
	const id = "dddd11112222"
	r := newRig(t, Limits{Beat: 50 * time.Millisecond})
	r.session(id)
	tmux := r.tmux(id)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	window := strings.ReplaceAll(tmux("display-message", "-p", "-t", "agent:second", "#{window_id}"), "@", "%40")
	open := func(query string) *websocket.Conn {
		t.Helper()
		c, err := r.logIn().terminal(ctx, id+"/terminal"+query)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for name, end := range map[string]struct {
		message string
		kind    websocket.MessageType
		want    string
	}{
		"not JSON":       {"hello", websocket.MessageText, "text message must be"},
		"no size":        {"{}", websocket.MessageText, "text message must be"},
		"too large":      {`{"cols":100000,"rows":20}`, websocket.MessageText, "text message must be"},
		"negative":       {`{"cols":-1,"rows":20}`, websocket.MessageText, "text message must be"},
		"closed window":  {"exec true\r", websocket.MessageBinary, ""},
		"unknown window": {"", 0, "window was closed"},
	} {
		t.Run(name, func(t *testing.T) {
			query := "?window=" + window
			if name == "unknown window" {
				query = "?window=%4099999"
			}
			if name == "closed window" {
				query = "?window=" + strings.ReplaceAll(tmux("new-window", "-P", "-d", "-F", "#{window_id}", shell), "@", "%40")
			}
			c := open(query)
			if end.kind == 0 {
				if why := reason(ctx, t, c); !strings.Contains(why, end.want) {
					t.Errorf("reason = %q, want %q", why, end.want)
				}
				return
			}
			readUntil(ctx, t, c, "ready> ")
			if err := c.Write(ctx, end.kind, []byte(end.message)); err != nil {
				t.Fatal(err)
			}
			if end.want == "" { // tmux shows another window of the session instead
				if err := c.Close(websocket.StatusNormalClosure, ""); err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("close = %v, want success", err)
				}
				return
			}
			if why := reason(ctx, t, c); !strings.Contains(why, end.want) {
				t.Errorf("reason = %q, want %q", why, end.want)
			}
		})
	}
	for _, query := range []string{"?window=1", "?window=%40x", "?cols=0", "?rows=5000", "?cols=a", "?other=1"} {
		resp, _ := r.do(call{path: "/ws/sessions/" + id + "/terminal" + query})
		if resp.StatusCode != http.StatusUnprocessableEntity {
			t.Errorf("terminal%s = %s, want 422", query, resp.Status)
		}
	}
	if resp, _ := r.do(call{path: "/ws/sessions/" + id + "/terminal"}); resp.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("terminal without WebSocket = %s, want 426", resp.Status)
	}
	if resp, _ := r.do(call{path: "/ws/sessions/" + id + "/terminal", as: ops.Read}); resp.StatusCode != http.StatusForbidden {
		t.Errorf("terminal for a reader = %s, want 403", resp.Status)
	}
	// Without a window, tmux is prepared first.
	if why := reason(ctx, t, open("")); !strings.Contains(why, "window was closed") {
		t.Errorf("reason without %s = %q, want the end", guestclient.ReadyTmux, why)
	}
	ready := filepath.Join(r.root(id), guestclient.ReadyTmux)
	if err := errors.Join(os.MkdirAll(filepath.Dir(ready), 0o700), os.WriteFile(ready, []byte("#!/bin/sh\ntest -d \"$2\"\n"), 0o700)); err != nil {
		t.Fatal(err)
	}
	c := open("")
	readUntil(ctx, t, c, "ready> ")
	_ = c.CloseNow()
	if _, err := r.store.Update(ctx, id, func(row *store.Session) (store.Event, error) {
		row.Status = json.RawMessage(`{}`)
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if resp, _ := r.do(call{path: "/ws/sessions/" + id + "/terminal"}); resp.StatusCode != http.StatusConflict {
		t.Errorf("terminal of a session without a VM = %s, want 409", resp.Status)
	}
}
