package session

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const submitted = "0123456789ab"

// serveSecrets answers keepers until the test ends.
func serveSecrets(t *testing.T, get func(context.Context, string) ([]byte, error)) (socket string) {
	t.Helper()
	socket = filepath.Join(testenv.ShortDir(t), "secrets.sock")
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- ServeSecrets(ctx, socket, slog.New(slog.DiscardHandler), get) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("ServeSecrets = %v, want nil", err)
		}
	})
	testenv.WaitFor(t, "a socket for this user only", func() bool {
		st, err := os.Stat(socket)
		return err == nil && st.Mode().Perm() == 0o600
	})
	return socket
}

func TestAskSubmitter(t *testing.T) {
	refs := []secret.Ref{{Name: "TOKEN", Source: secret.SubmitterOf(submitted)}}
	const value = "pretend-secret-0123"
	var asked atomic.Int32
	socket := serveSecrets(t, func(_ context.Context, task string) ([]byte, error) {
		if asked.Add(1) == 1 {
			return nil, fail.New(fail.Host, "host one did not send the secrets: it is not connected to the cluster")
		}
		return secret.Encode(map[string]secret.Value{"TOKEN": secret.NewValue(value + task), "OTHER": secret.NewValue("x")}, nil)
	})
	var reports []string
	report := func(text string) { reports = append(reports, text) }
	values, err := askSubmitter(t.Context(), socket, refs, time.Minute, report)
	if err != nil || len(values) != 1 || values["TOKEN"].Reveal() != value+submitted {
		t.Errorf("secrets = %v, %v, want TOKEN", values, err)
	}
	if want := []string{"waiting for the secrets of the task: host one did not send the secrets: it is not connected to the cluster"}; !slices.Equal(reports, want) {
		t.Errorf("reports = %q, want %q", reports, want)
	}

	for what, c := range map[string]struct {
		answer error
		wait   time.Duration
		want   string
		asked  int32
	}{
		"a refusal":           {fail.New(fail.Policy, "host one did not send the secrets: refused"), time.Hour, "host one did not send the secrets: refused", 1},
		"silence of the host": {fail.New(fail.Host, "host one did not send the secrets: it does not answer"), 0, "get the secrets TOKEN of the task: host one did not send the secrets", 1},
	} {
		asked.Store(0)
		at := serveSecrets(t, func(context.Context, string) ([]byte, error) { asked.Add(1); return nil, c.answer })
		_, err := askSubmitter(t.Context(), at, refs, c.wait, report)
		if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), c.want) || asked.Load() != c.asked {
			t.Errorf("%s: %v (code %v) after %d questions, want %q after %d", what, err, fail.CodeOf(err), asked.Load(), c.want, c.asked)
		}
	}
	if _, err := askSubmitter(t.Context(), socket+"x", refs, 0, report); fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), "serve is not running") {
		t.Errorf("without serve: %v, want that it is not running", err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	if _, err := askSubmitter(ctx, socket+"x", refs, time.Hour, report); ctx.Err() == nil || err == nil {
		t.Errorf("cancelled = %v, want an error once it was cancelled", err)
	}
	if _, err := askServe(t.Context(), socket, "../x"); err == nil || !strings.Contains(err.Error(), "names no task") {
		t.Errorf("question about an invalid id = %v, want a refusal", err)
	}
	if values, err := askSubmitter(t.Context(), socket+"x", nil, 0, report); err != nil || len(values) != 0 {
		t.Errorf("no secrets = %v, %v, want none without a question", values, err)
	}
}

// TestSubmittersSecretsAreNotResolvedHere checks that a keeper resolves its own host's secrets, and asks
// for the others.
func TestSubmittersSecretsAreNotResolvedHere(t *testing.T) {
	m := newManager(t)
	m.Self = filepath.Join(t.TempDir(), "resolver")
	got := m.Self + ".refs"
	if err := os.WriteFile(m.Self, []byte("#!/bin/sh\ncat >"+got+"\necho '{\"values\":{\"OWN\":\"b3du\"}}'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := boundSecrets(m.Config, map[string]config.Secret{
		"OWN":   {From: "vault:a:b", Binding: config.Binding{Guest: true}},
		"TOKEN": {From: secret.SubmitterOf(submitted), Binding: config.Binding{Guest: true}},
		"HOST":  {From: secret.SubmitterOf(submitted), Binding: config.Binding{To: []config.Host{"api.example.org"}}},
	}, true)
	if err != nil {
		t.Fatal(err)
	}
	problem := fail.New(fail.Secret, "on host one: secret HOST (env): it is not set")
	err = s.resolve(t.Context(), m.Self, func(refs []secret.Ref) (map[string]secret.Value, error) {
		if len(refs) != 2 || refs[0].Task() != submitted {
			t.Errorf("secrets that are asked for = %v, want HOST and TOKEN of task %s", refs, submitted)
		}
		return map[string]secret.Value{"TOKEN": secret.NewValue("theirs")}, secret.Unresolved{"HOST": problem}
	})
	if err != nil || s.values["OWN"].Reveal() != "own" || s.values["TOKEN"].Reveal() != "theirs" || s.failed["HOST"] == nil {
		t.Errorf("resolve = %v, want OWN from here, TOKEN from there, and the problem of HOST", err)
	}
	var refs []secret.Ref
	text, err := os.ReadFile(got)
	if err == nil {
		err = json.Unmarshal(text, &refs)
	}
	if err != nil || len(refs) != 1 || refs[0].Name != "OWN" {
		t.Errorf("secrets that are resolved here = %s, %v, want OWN", text, err)
	}
	if _, err := secret.Resolve(t.Context(), []secret.Ref{{Name: "TOKEN", Source: secret.SubmitterOf(submitted)}}, secret.Options{}); err == nil {
		t.Error("a secret of a submitter was resolved on this host, want an error")
	}
}
