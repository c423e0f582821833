package session

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// TestSilentGuestDelaysNoDenial denies a name to a session with two subtasks, whose guests accept
// connections and never answer. Neither may keep the denial from the other.
func TestSilentGuestDelaysNoDenial(t *testing.T) {
	m := newManager(t)
	root := put(t, m, "aaaaaaaaaaaa", "acme/app", Stopped, Stopped, Status{})
	private, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	reached := make(chan string, 2)
	for _, id := range []string{"bbbbbbbbbbbb", "cccccccccccc"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			if c, err := l.Accept(); err == nil {
				reached <- id
				t.Cleanup(func() { _ = c.Close() })
			}
		}()
		spec, err1 := json.Marshal(Spec{
			Repo: repo.Ref{Key: "github.com/acme/app", Slug: "acme/app"}, Within: &Bounds{Policy: &policy.Policy{Mode: policy.Allowlist}, Sessions: []string{root.ID}},
		})
		status, err2 := json.Marshal(Status{Endpoint: vm.Endpoint{Addr: l.Addr().String(), User: "agent", HostKey: public}})
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		if err := os.MkdirAll(m.Config.Paths.SessionDir(id), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(m.Config.Paths.SessionDir(id), "ssh_key"), private, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Store.Create(t.Context(), store.Session{
			ID: id, Name: "agent-" + id, RepoKey: "github.com/acme/app", Repo: "acme/app", Task: id, Phase: string(Ready), Desired: string(Ready), Spec: spec, Status: status,
		}, phaseEvent("", Ready, Ready), func([]store.Session) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := Net{Sessions: m}.Deny(ctx, root, []string{"files.example.org"})
		done <- err
	}()
	for range 2 {
		select {
		case <-reached:
		case err := <-done:
			t.Fatalf("Deny = %v before both guests were reached", err)
		case <-time.After(20 * time.Second):
			t.Error("one silent guest keeps the denial from the other, want both to be reached")
		}
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("Deny with guests that never answer = nil, want an error")
	}
}
