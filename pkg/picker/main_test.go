package picker

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m, nil) }

// newPicker returns a Picker with its own store and no keepers.
func newPicker(t *testing.T, env ...string) *Picker {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	cfg := &config.Config{Paths: config.Paths{
		Config: filepath.Join(home, "conf"), State: filepath.Join(home, "state"), Cache: filepath.Join(home, "cache"), LimaHome: filepath.Join(home, "vms"),
	}}
	if err := os.MkdirAll(cfg.Paths.Cache, 0o700); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), cfg.Paths.Store())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	p := New(&session.Manager{Store: st, Config: cfg, Self: "true"}, console.New(&bytes.Buffer{}, &bytes.Buffer{}, func(name string) string {
		for _, e := range env {
			if k, v, _ := strings.Cut(e, "="); k == name {
				return v
			}
		}
		return ""
	}), nil)
	p.Unicode = true
	return p
}

// row is a session to put into the store.
type row struct {
	id, key, slug  string
	label          string
	path, url      string
	phase, desired session.Phase
	status         session.Status
	err, hint      string
}

func (p *Picker) put(t *testing.T, r row) {
	t.Helper()
	marshal := func(v any) json.RawMessage {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	if r.key == "" {
		r.key = "github.com/" + r.slug
	}
	if r.desired == "" {
		r.desired = r.phase
	}
	if r.desired == session.Broken {
		r.desired = session.Ready
	}
	_, _, err := p.Manager.Store.Create(t.Context(), store.Session{
		ID: r.id, Name: "agent-" + r.id, RepoKey: r.key, Label: r.label, Repo: r.slug, Phase: "creating", Desired: "ready",
		Spec: marshal(session.Spec{
			Repo: repo.Ref{Key: r.key, Slug: r.slug, Path: r.path, URL: r.url}, Image: "none",
			Resources: config.Resources{CPUs: 2, Memory: 1 << 30, Disk: 4 << 30},
		}),
	}, store.Event{Kind: "phase", Data: []byte("{}")}, func([]store.Session) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Manager.Store.Update(t.Context(), r.id, func(row *store.Session) (store.Event, error) {
		row.Phase, row.Desired, row.Status = string(r.phase), string(r.desired), marshal(r.status)
		row.SetError("host", r.err, r.hint)
		return store.Event{Kind: "phase", Data: []byte("{}")}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (p *Picker) observation(t *testing.T, id string, g guestproto.Observation) {
	t.Helper()
	dir := p.Manager.Config.Paths.SessionDir(id)
	text, err := json.Marshal(g)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "observation.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func attention(state guestproto.AgentState, on string, since time.Time) session.Status {
	return session.Status{Attention: &session.Attention{State: state, Agent: "claude", On: on, Since: since}}
}

// hostile is text that an attacker could have chosen.
const hostile = "e\x1b[31mvil\x1b]0;owned\a\r\n\tx\u202e\u200bname\x9b2J 日本語の長い名前" + "\x00" + "z\u0301\u0301"
