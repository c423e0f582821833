package review

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// pullClone returns a clone whose remote is acme/app on GitHub. A stand-in for ssh serves it from a directory.
func pullClone(t *testing.T) (clone string, git func(line string) string) {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(home, ".config"))
	clone = filepath.Join(home, "clone")
	git = func(line string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "sh", "-ec", "cd '"+home+"' && git "+line).CombinedOutput()
		if err != nil {
			t.Fatalf("git %s: %v\n%s", line, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	git("config --global user.name U && git config --global user.email u@example.com && git config --global init.defaultBranch main")
	git("init -q --bare hub && git init -q clone && cd clone && git commit -q --allow-empty -m start && git push -q ../hub main")
	git("-C clone remote add origin git@github.com:acme/app.git")
	ssh := filepath.Join(home, "ssh")
	if err := os.WriteFile(ssh, []byte("#!/bin/sh\nexec git receive-pack '"+home+"/hub'\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Setenv("GIT_SSH_COMMAND", ssh)
	t.Setenv("GIT_SSH_VARIANT", "simple")
	return clone, git
}

func TestRemoteOfAnotherRepository(t *testing.T) {
	clone, git := pullClone(t)
	p := Pulls{Clone: clone, Key: "github.com/acme/other", Base: "main"}
	if err := p.Check(t.Context(), "review/s"); err == nil || !strings.Contains(err.Error(), "is not the session's repository github.com/acme/other") {
		t.Errorf("pull request for another repository: %v, want an error", err)
	}
	git("-C clone remote set-url --push origin https://github.com/evil/app.git")
	p.Key = "github.com/acme/app"
	if err := p.Check(t.Context(), "review/s"); err == nil || !strings.Contains(err.Error(), "is not the session's repository github.com/acme/app") {
		t.Errorf("push to another repository: %v, want an error", err)
	}
	git("-C clone remote remove origin")
	if err := p.Check(t.Context(), "review/s"); err == nil || !strings.Contains(err.Error(), "has no remote") {
		t.Errorf("pull request without a remote: %v, want an error", err)
	}
}

// fakeHub is the API of a host of pull requests.
type fakeHub struct {
	asked  []string
	open   []pullAnswer
	status int
}

func (h *fakeHub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer the-token" {
		http.Error(w, `{"message":"no token"}`, http.StatusUnauthorized)
		return
	}
	var body map[string]string
	_ = json.NewDecoder(r.Body).Decode(&body) // a GET has none
	h.asked = append(h.asked, fmt.Sprintf("%s %s %v", r.Method, r.URL, body))
	switch {
	case h.status == http.StatusFound:
		http.Redirect(w, r, "/elsewhere", h.status)
	case h.status != 0:
		w.WriteHeader(h.status)
		fmt.Fprint(w, `{"message":"Validation\u001b[31m Failed"}`)
	case r.Method == http.MethodGet:
		_ = json.NewEncoder(w).Encode(h.open)
	default:
		_ = json.NewEncoder(w).Encode(pullAnswer{"https://github.com/acme/app/pull/7"})
	}
}

func TestPullOverAPI(t *testing.T) {
	clone, _ := pullClone(t)
	hub := &fakeHub{open: []pullAnswer{}}
	srv := httptest.NewServer(hub)
	defer srv.Close()
	p := Pulls{Clone: clone, Key: "github.com/acme/app", Base: "main", API: srv.URL, Token: func(_ context.Context, host string) (secret.Value, error) {
		if host != "github.com" {
			t.Errorf("token for %q, want github.com", host)
		}
		return secret.NewValue("the-token"), nil
	}}
	if err := p.Check(t.Context(), "review/s"); err != nil {
		t.Fatalf("check: %v", err)
	}
	for _, branch := range []string{"main", "master"} {
		if err := p.Check(t.Context(), branch); fail.CodeOf(err) != fail.Usage {
			t.Errorf("pull request from %s: %v, want a usage error", branch, err)
		}
	}
	target, err := p.target(t.Context(), "123")
	if err != nil {
		t.Fatal(err)
	}
	// A branch that looks like the number of a pull request is a branch.
	if _, err := target.opener.find(t.Context(), target, "123"); err != nil {
		t.Fatal(err)
	}
	address, err := target.opener.open(t.Context(), target, "123", "Title", "Body")
	if err != nil || address != "https://github.com/acme/app/pull/7" {
		t.Errorf("open: %q, %v, want the address", address, err)
	}
	want := []string{"GET /repos/acme/app/pulls?head=acme%3A123&state=open map[]", "POST /repos/acme/app/pulls map[base:main body:Body head:123 title:Title]"}
	if strings.Join(hub.asked, "\n") != strings.Join(want, "\n") {
		t.Errorf("requests:\n%s\nwant:\n%s", strings.Join(hub.asked, "\n"), strings.Join(want, "\n"))
	}
	hub.status = http.StatusUnprocessableEntity
	if _, err := target.opener.open(t.Context(), target, "123", "", ""); err == nil || !strings.Contains(err.Error(), "422 Unprocessable Entity: Validation Failed") {
		t.Errorf("refused: %v, want the answer without control characters", err)
	}
	hub.status, hub.asked = http.StatusFound, nil
	if _, err := target.opener.find(t.Context(), target, "123"); err == nil || len(hub.asked) != 1 {
		t.Errorf("redirected: %v after %v, want an error after one request", err, hub.asked)
	}
	p.Token = func(context.Context, string) (secret.Value, error) { return secret.Value{}, nil }
	if err := p.Check(t.Context(), "review/s"); fail.CodeOf(err) != fail.Secret {
		t.Errorf("check without a token: %v, want an error about the login", err)
	}
	p.API = "http://192.0.2.1/api"
	p.Token = func(context.Context, string) (secret.Value, error) { return secret.NewValue("the-token"), nil }
	if err := p.Check(t.Context(), "review/s"); fail.CodeOf(err) != fail.Usage {
		t.Errorf("API without TLS: %v, want a usage error", err)
	}
}

func TestPullWithGH(t *testing.T) {
	clone, git := pullClone(t)
	home := filepath.Dir(clone)
	bin := filepath.Join(home, "bin")
	if err := os.MkdirAll(bin, 0o700); err != nil {
		t.Fatal(err)
	}
	gh := `#!/bin/sh
echo "$*" >>'` + home + `/asked'
case "$1 $2" in
'auth status') exit 0 ;;
'pr list') cat '` + home + `/open' ;;
'pr create') cat >'` + home + `/body'; echo creating; echo https://github.com/acme/app/pull/8 ;;
esac
`
	for name, content := range map[string]string{"bin/gh": gh, "open": "[]"} {
		if err := os.WriteFile(filepath.Join(home, name), []byte(content), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	p := Pulls{Clone: clone, Key: "github.com/acme/app", Base: "main"}
	git("-C clone commit -q --allow-empty -m 'On the branch' && git -C clone tag -a -m tag follows")
	git("-C clone config push.followTags true && git -C clone config remote.origin.push refs/heads/main")
	trap := filepath.Join(home, "ran")
	hook := filepath.Join(clone, ".git", "hooks", "pre-push")
	if err := os.WriteFile(hook, []byte("#!/bin/sh\ntouch "+trap+"\n"), 0o700); err != nil { //nolint:gosec // a hook
		t.Fatal(err)
	}
	done := Landed{Branch: "review/s", Tip: git("-C clone rev-parse HEAD"), Message: "-x Title\n\nBody\n"}
	address, err := p.Create(t.Context(), done, nil)
	if err != nil || address != "https://github.com/acme/app/pull/8" {
		t.Fatalf("create: %q, %v, want the address", address, err)
	}
	if got, want := git("-C hub for-each-ref --format='%(refname) %(subject)'"), "refs/heads/main start\nrefs/heads/review/s On the branch"; got != want {
		t.Errorf("references of the remote:\n%s\nwant:\n%s", got, want)
	}
	if _, err := os.Stat(trap); err == nil {
		t.Error("the hook pre-push ran")
	}
	body, err := os.ReadFile(filepath.Join(home, "body"))
	if string(body) != "Body" {
		t.Errorf("body: %q, %v, want Body", body, err)
	}
	asked, err := os.ReadFile(filepath.Join(home, "asked"))
	if want := `auth status --hostname=github.com
pr list --repo=github.com/acme/app --head=review/s --state=open --limit=1 --json=url
pr create --repo=github.com/acme/app --head=review/s --base=main --title=-x Title --body-file=-
`; string(asked) != want {
		t.Errorf("gh was called with (%v):\n%swant:\n%s", err, asked, want)
	}
	if err := os.WriteFile(filepath.Join(home, "open"), []byte(`[{"url":"https://github.com/acme/app/pull/1"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	if address, err := p.Create(t.Context(), done, nil); address != "https://github.com/acme/app/pull/1" {
		t.Errorf("create a second time: %q, %v, want the open pull request", address, err)
	}
	// Nothing is pushed unless a pull request can be opened, and nothing there is overwritten.
	done.Tip = git("-C clone commit-tree -m other HEAD^{tree}")
	if _, err := p.Create(t.Context(), done, nil); err == nil {
		t.Error("push another history: no error, want one")
	}
	if err := os.WriteFile(filepath.Join(bin, "gh"), []byte("#!/bin/sh\nexit 1\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	done.Branch = "review/other"
	if _, err := p.Create(t.Context(), done, nil); fail.CodeOf(err) != fail.Secret {
		t.Errorf("create without a login: %v, want an error about it", err)
	}
	if got := git("-C hub branch --list 'review/*' --format='%(subject)'"); got != "On the branch" {
		t.Errorf("branches of the remote: %q, want the first one only", got)
	}
}
