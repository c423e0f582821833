//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// TestSetup opens a session of a repository with a setup, and then others, which start from its result
// with only the new commits.
func TestSetup(t *testing.T) {
	long(t)
	b := newBox(t)
	dir := b.Repo("project")
	b.Write("project/.agent-sessionizer.yaml", `setup:
  run: |
    mkdir -p deps
    cat hello.txt >deps/installed
    (setsid sleep 100000 >/dev/null 2>&1 &)
  files: [hello.txt]
`)
	b.RunIn(dir, "sh", "-c", "git add . && git commit -qm setup")
	view := func(name string) (v session.View) {
		t.Helper()
		var all []session.View
		if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &all); err != nil {
			t.Fatal(err)
		}
		for _, v := range all {
			if v.Name == name {
				return v
			}
		}
		t.Fatalf("no session %s", name)
		return v
	}
	results := func(v session.View) (text string) {
		for _, r := range v.Setup {
			text += r.Step + " " + string(r.State) + "\n"
		}
		return text
	}
	one := b.open("./project")
	if got := results(view(one)); got != "setup done\n" {
		t.Fatalf("setup of the first session = %q, want done", got)
	}
	ids := map[string]map[string]string{one: who(t, b, one)}
	b.MustIn(one, "echo mine >notes && git checkout -qb mine && git commit -q --allow-empty -m agent")
	b.RunIn(dir, "sh", "-c", "echo more >other && git add . && git commit -qm other")
	b.Asz("destroy", "--force", one) // the result outlives its session

	two := b.open("./project")
	if v := view(two); results(v) != "setup reused\n" || v.From != "setup" {
		t.Errorf("second session = from %s, setup %+v, want that of the first", v.From, v.Setup)
	}
	got := b.MustIn(two, "cat deps/installed other; git log --format=%s | head -1; git branch --show-current; git status --short; pgrep -c -u agent -x sleep; ls notes 2>&1 || :")
	if !strings.HasPrefix(got, "hello\nmore\nother\n") || !strings.Contains(got, "?? deps/\n1\n") || !strings.Contains(got, "cannot access") {
		t.Errorf("second session = %q, want the new commit, the result of the setup, its process, and nothing of the first", got)
	}
	ids[two] = who(t, b, two)
	for what, value := range ids[one] {
		if ids[two][what] == value {
			t.Errorf("both sessions have the %s %q", what, value)
		}
	}
	b.Asz("destroy", "--force", two)

	// With a dev container and services. There is no registry: their image consists of files of the
	// guest.
	b.Write("project/.agent-sessionizer.yaml", `setup:
  run: |
    mkdir -p deps
    cat hello.txt >deps/installed
    root=$(mktemp -d)
    mkdir -p "$root"/tmp "$root"/usr/{bin,lib,lib64}
    ln -s usr/bin usr/lib usr/lib64 "$root"
    for p in sh bash cat sleep true id uname env printenv getent grep sed mkdir chmod chown ls test touch rm tr cut head sort; do
      program=$(type -P "$p")
      cp -L --parents "$program" $(ldd "$program" | grep -o "/lib[^ ]*") "$root"
    done
    cp --parents /etc/passwd /etc/group "$root"
    tar -C "$root" -c . | docker import - local/base
  devcontainer: true
  services: dev/compose.yaml
`)
	b.Write("project/.devcontainer/devcontainer.json", `{"image": "local/base", "updateRemoteUserUID": false, "postCreateCommand": "echo created >/tmp/created"}
`)
	b.Write("project/dev/compose.yaml", `services:
  db:
    image: local/base
    command: ["sh", "-c", "echo ready >/tmp/ready; exec sleep 100000"]
    healthcheck: {test: ["CMD", "cat", "/tmp/ready"], interval: 2s}
  migrate:
    image: local/base
    command: ["true"]
    depends_on: {db: {condition: service_healthy}}
`)
	b.RunIn(dir, "sh", "-c", "git add . && git commit -qm services")
	const containers = "docker exec $(docker ps -q -f label=devcontainer.local_folder) cat /tmp/created; docker compose -f dev/compose.yaml ps --format '{{.Service}} {{.Health}}'"
	four := b.open("./project")
	if got := results(view(four)); got != "setup done\ndevcontainer done\nservices done\n" {
		t.Errorf("setup with services = %q, want each done", got)
	}
	for _, when := range []string{"a first start", "a restart"} {
		if got := b.MustIn(four, containers); got != "created\ndb healthy" {
			t.Errorf("containers after %s = %q, want the dev container and a healthy db", when, got)
		}
		if log := b.Asz("logs", "--of", "services", four); !strings.Contains(log, "migrate") {
			t.Errorf("logs --of services after %s = %q, want all services", when, log)
		}
		if when == "a first start" {
			b.Asz("stop", four)
			b.Asz("open", "-d", four)
		}
	}
	b.Asz("destroy", "--force", four)
	b.Asz("prune", "--unused-for", "0s")
	if left := b.Asz("image", "list"); strings.Contains(left, "setup-") {
		t.Errorf("image list after prune = %s, want no result of a setup", left)
	}
}
