package task

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// TestSecretsOfOtherHosts checks that a task of the cluster reads no variable, no file and runs no command
// on a host where no user submitted it, also after a retry there.
func TestSecretsOfOtherHosts(t *testing.T) {
	m := newManager(t, 1, 10)
	sources := map[string]string{
		"MY_VAR": "env:HOME", "MY_FILE": "file:/etc/passwd", "MY_CMD": "cmd:id", "MY_KEYS": "keychain:a/b", "MY_AGE": "age:/x", "MY_OP": "op://a/b/c", "MY_VAULT": "vault:a:b",
	}
	var lines []string
	for name, from := range sources {
		kind, key, _ := strings.Cut(from, ":")
		lines = append(lines, "{name: "+name+", source: "+kind+", key: '"+strings.TrimPrefix(key, "//")+"', guest: true}")
	}
	asked, _, err := manifest.Parse("m", []byte("{version: '1', kind: Task, repository: {url: acme/app}, agent: {kind: command, command: ['true']}, secrets: ["+strings.Join(lines, ", ")+"]}"), "/")
	if err != nil {
		t.Fatal(err)
	}
	theirs := []string{"MY_AGE", "MY_CMD", "MY_FILE", "MY_KEYS", "MY_VAR"}
	refs, err := SubmittersSecrets(asked)
	var names []string
	for _, r := range refs {
		names = append(names, r.Name)
	}
	slices.Sort(names)
	if err != nil || !slices.Equal(names, theirs) {
		t.Errorf("secrets of the submitter = %v, %v, want %v", names, err, theirs)
	}
	if field, is, err := bound(asked, nil); is || err != nil {
		t.Errorf("bound = %q, %v, %v, want that the task can run anywhere", field, is, err)
	}
	text, err := asked.Encode()
	if err != nil {
		t.Fatal(err)
	}
	alone, ours, other := "000000000001", "000000000002", "000000000003"
	row := func(id, host string) store.Task {
		return store.Task{ID: id, Name: "t", Phase: string(Failed), Desired: string(Run), Manifest: text, Host: host}
	}
	for id, host := range map[string]string{alone: "", ours: store.Waiting} {
		if _, err := m.store().CreateTask(t.Context(), row(id, host), nil, store.Event{Kind: "phase"}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{ours, other} {
		is := row(id, store.Waiting)
		is.Status = []byte("{}")
		if err := m.store().Replicate(t.Context(), []store.Replica{{Task: is, Newest: 1, Revision: 5, Fence: 5}}, 5); err != nil {
			t.Fatal(err)
		}
	}
	for id, want := range map[string][]string{alone: nil, ours: nil, other: theirs} {
		r := session.Request{Secrets: map[string]config.Secret{}}
		for name, from := range sources {
			r.Secrets[name] = config.Secret{From: from, Binding: config.Binding{Guest: true}}
		}
		if err := m.leaveToSubmitter(t.Context(), id, &r); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range slices.Sorted(maps.Keys(r.Secrets)) {
			switch {
			case r.Secrets[name].From == secret.SubmitterOf(id):
				got = append(got, name)
			case r.Secrets[name].From != sources[name]:
				t.Errorf("source of %s of task %s = %s, want %s", name, id, r.Secrets[name].From, sources[name])
			}
			if !r.Secrets[name].Guest {
				t.Errorf("the binding of %s was lost", name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("secrets of task %s that its submitter resolves = %v, want %v", id, got, want)
		}
		err := m.checkRetryable(t.Context(), mustGet(t, m, id))
		if id == other && fail.CodeOf(err) != fail.Conflict || id != other && err != nil {
			t.Errorf("retry of task %s = %v, want a refusal only of the other host's", id, err)
		}
	}
	// A manifest that a hostile host wrote into the log names the secrets of another task.
	r := session.Request{Secrets: map[string]config.Secret{"STOLEN": {From: secret.SubmitterOf(ours)}}}
	if err := m.leaveToSubmitter(t.Context(), other, &r); err != nil || r.Secrets["STOLEN"].From != secret.SubmitterOf(other) {
		t.Errorf("source of another task's secret = %s, %v, want %s", r.Secrets["STOLEN"].From, err, secret.SubmitterOf(other))
	}
	for _, url := range []string{"file:///srv/app"} {
		local := *asked
		local.Repository.URL = url
		if field, is, err := bound(&local, nil); !is || field != "repository.url" || err != nil {
			t.Errorf("bound of %s = %q, %v, %v, want repository.url", url, field, is, err)
		}
	}
	if _, _, err := m.Retry(t.Context(), mustGet(t, m, other), Submission{}); fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "only the host on which task") {
		t.Errorf("Retry of another host's task = %v, want a refusal", err)
	}
}
