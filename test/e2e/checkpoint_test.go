//go:build e2e

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// talk is conversations with Claude Code in sessions.
type talk struct {
	*box
	request *atomic.Value // the last one that a model got
}

func (k talk) screen(name string) string {
	return k.MustIn(name, "tmux capture-pane -p -t agent:claude")
}

// claude returns the process of Claude Code, "" for none.
func (k talk) claude(name string) string {
	return strings.TrimSpace(k.In(name, "pgrep -u agent -x claude").Stdout)
}

// say sends a prompt to Claude Code, and waits until its API gets it.
func (k talk) say(t *testing.T, name, text string) (conversation string) {
	t.Helper()
	k.MustIn(name, "tmux send-keys -t agent:claude -l '"+text+"'")
	testenv.WaitFor(t, "the typed prompt", func() bool { return strings.Contains(k.screen(name), text) })
	k.MustIn(name, "tmux send-keys -t agent:claude Enter")
	testenv.WaitFor(t, "the request with "+text, func() bool {
		conversation, _ = k.request.Load().(string)
		return strings.Contains(conversation, text)
	})
	return conversation
}

// TestCheckpoint talks with the real Claude Code, makes a checkpoint, lets the agent damage
// everything, and restores it: the conversation goes on. Then it suspends the session, and forks it.
func TestCheckpoint(t *testing.T) {
	t.Parallel()
	useForgeAddr(t, "api.anthropic.com")
	b := newBox(t)
	b.Repo("project")
	key := "sk-ant-oat01-" + random()
	forge := newForge(t, filepath.Join(b.Home, "forge"), "", "api.anthropic.com")
	m := &model{think: make(chan struct{})}
	var request atomic.Value // the last one
	forge.http.HandleFunc("/v1/", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+key {
			t.Errorf("%s with authorization %q, want the real token", r.URL.Path, r.Header.Get("Authorization"))
		}
		body, _ := io.ReadAll(r.Body)
		if bytes.Contains(body, []byte(`"tools":[{`)) { // otherwise it asks for a title
			request.Store(string(body))
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		m.ServeHTTP(w, r)
	})
	b.Write("ca.pem", string(forge.ca))
	b.Write("claude.key", key)
	b.Env = append(b.Env, "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
	b.Write(".config/agent-sessionizer/config.yaml", `
secrets:
  ANTHROPIC_AUTH_TOKEN: {from: "file:`+filepath.Join(b.Home, "claude.key")+`", to: [api.anthropic.com], like: sk-ant-oat01-}
`)
	name := b.open("./project")
	view := func() session.View {
		t.Helper()
		var all []session.View
		if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &all); err != nil || len(all) != 1 {
			t.Fatalf("list = %d sessions, %v, want one", len(all), err)
		}
		return all[0]
	}
	talk := talk{b, &request}
	screen := func() string { return talk.screen(name) }
	claude := func() string { return talk.claude(name) }
	say := func(text string) string { t.Helper(); return talk.say(t, name, text) }
	was := ""
	testenv.WaitFor(t, "Claude Code", func() bool {
		at := view().Attention
		if now := fmt.Sprintf("%+v", at); now != was {
			was = now
			t.Log(now, screen())
		}
		return at != nil && at.State == "idle"
	})
	say("remember ALPHA")
	testenv.WaitFor(t, "the answer", func() bool { return strings.Contains(screen(), "All done.") })
	b.MustIn(name, "echo mine >notes && sync")
	pid := claude()
	// answers lets the user answer the question of a script, which gets the answer.
	answers := func(text string) {
		t.Helper()
		b.Asz("answer", b.question(guestproto.AskText, "Which port?").ID, text)
		testenv.WaitFor(t, "the answer in the script", func() bool { return b.In(name, "cat /tmp/port").Stdout == text+"\n" })
	}
	b.MustIn(name, `tmux new-window -d -n script 'agent-guest ask "Which port?" >/tmp/port'`)
	b.question(guestproto.AskText, "Which port?")

	var made session.Checkpoint
	if err := json.Unmarshal([]byte(b.Asz("checkpoint", name, "talk", "--json")), &made); err != nil {
		t.Fatal(err)
	}
	t.Logf("checkpoint: %+v", made)
	if !made.Memory || made.Secrets || made.Pause == 0 {
		t.Errorf("checkpoint = %+v, want memory, no secrets, and a pause", made)
	}
	if now := claude(); now != pid {
		t.Errorf("Claude Code after the checkpoint = process %s, want %s", now, pid)
	}
	files, err := filepath.Glob(filepath.Join(b.Home, ".agent-vms", name, "agent-sessionizer-[cslnw]*-????????????"))
	if err != nil || len(files) < 3 {
		t.Fatalf("files of the checkpoint = %v, %v, want description, memory and disk", files, err)
	}
	for _, file := range files {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v, %v, want no access for others", file, st.Mode(), err)
		}
		if r := b.Run("grep", "-c", "-F", key, file); r.Code != 1 {
			t.Errorf("grep for the token in %s = exit %d, want that it is not there", file, r.Code)
		}
	}

	damage := func() {
		t.Helper()
		b.MustIn(name, "rm -rf .git notes README*; pkill -KILL -u agent -x claude; sync")
	}
	intact := func(when string) {
		t.Helper()
		if got := b.MustIn(name, "cat notes && git log --oneline | wc -l"); !strings.HasPrefix(got, "mine") {
			t.Errorf("%s: files = %q, want them intact", when, got)
		}
		if now := claude(); now != pid {
			t.Errorf("%s: Claude Code = process %s, want %s", when, now, pid)
		}
		clock, err := strconv.ParseInt(b.MustIn(name, "date +%s"), 10, 64)
		if ahead := clock - time.Now().Unix(); err != nil || ahead < -30 || ahead > 30 {
			t.Errorf("%s: the guest's clock is %d s ahead, %v", when, ahead, err)
		}
	}
	answers("8080")
	say("damage BETA")
	damage()
	u := newTerminal(t, b) // stays attached
	u.typed("unset TMUX; "+realvm.Binary()+" open "+name, "Enter")
	u.sees("scratch")
	u.typed("C-b", "5")
	u.sees("scratch*")
	clients := b.Processes("attach-session")
	b.Asz("restore", name, "talk")
	intact("restored")
	answers("9090") // the script waits again
	// Input without a connection is dropped, so type until the terminal is connected again.
	for end := time.Now().Add(3 * time.Minute); !strings.Contains(u.screen(), "back-42"); time.Sleep(3 * time.Second) {
		if time.Now().After(end) {
			t.Fatalf("screen after the restore = %s, want back-42: the terminal must reconnect", u.screen())
		}
		u.typed("C-b", "5")
		u.typed("echo back-$((40+2))", "Enter")
	}
	for pid := range b.Processes("attach-session") {
		if clients[pid] == "" {
			t.Errorf("attach-session process %v is new, want the one before to reconnect: %v", pid, clients)
		}
	}
	u.typed("C-b", "d")
	if said := say("recall GAMMA"); !strings.Contains(said, "ALPHA") || strings.Contains(said, "BETA") {
		t.Errorf("conversation after the restore = %s, want ALPHA and not BETA", said)
	}

	// The restore is undone and done again.
	if !testing.Short() {
		b.Asz("restore", name, session.BeforeRestore)
		if got := b.In(name, "ls notes").Code; got == 0 || claude() != "" {
			t.Errorf("after undoing the restore: notes exist: %t, Claude Code = %q, want the damage", got == 0, claude())
		}
		b.Asz("restore", name, "talk")
		intact("restored again")
		answers("9091")
	}

	// Suspended, and resumed.
	say("then DELTA")
	b.Asz("stop", "--suspend", name)
	if v := view(); v.State != session.Stopped || !v.Suspended {
		t.Errorf("session = %s, suspended %t, want it suspended", v.State, v.Suspended)
	}
	b.Asz("start", name)
	intact("resumed")
	if said := say("finally EPSILON"); !strings.Contains(said, "ALPHA") || !strings.Contains(said, "DELTA") {
		t.Errorf("conversation after the resumption = %s, want ALPHA and DELTA", said)
	}
	checkForks(t, talk, name, pid)
	b.Asz("checkpoints", name, "--remove", "talk", "--remove", session.BeforeRestore)
	left, err := filepath.Glob(filepath.Join(b.Home, ".agent-vms", name, "agent-sessionizer-state-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("memory on the disk at the end = %v, %v, want none", left, err)
	}
	if !testing.Short() {
		b.Asz("stop", name)
		b.Asz("start", name)
		b.MustIn(name, "cat notes")
	}
	if t.Failed() {
		t.Log(b.Asz("logs", name))
	}
	b.Asz("destroy", "--force", name)
	u.tmux("kill-server")
	if left := b.Leftovers(); len(left) > 0 {
		t.Errorf("processes at the end = %v, want none", left)
	}
}
