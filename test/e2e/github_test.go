//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// hub answers what gh asks GitHub's API for team/project, and keeps the changes that it was asked for.
type hub struct {
	token string

	mu      sync.Mutex
	changes []string
}

// serveHub adds GitHub's API to a forge.
func (f *forge) serveHub() *hub {
	h := &hub{token: f.token}
	f.http.HandleFunc("api.github.com/graphql", h.graphQL)
	f.http.HandleFunc("api.github.com/", h.rest)
	return h
}

func (h *hub) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.changes = append(h.changes, fmt.Sprintf(format, args...))
}

// seen returns the changes since the last call.
func (h *hub) seen() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := strings.Join(h.changes, "\n")
	h.changes = nil
	return all
}

func (h *hub) knows(w http.ResponseWriter, r *http.Request) bool {
	if header := r.Header.Get("Authorization"); header != "token "+h.token && header != "Bearer "+h.token {
		http.Error(w, `{"message": "Bad credentials"}`, http.StatusUnauthorized)
		return false
	}
	w.Header().Set("Content-Type", "application/json")
	return true
}

func (h *hub) rest(w http.ResponseWriter, r *http.Request) {
	if !h.knows(w, r) {
		return
	}
	if r.Method != http.MethodGet {
		h.note("%s %s", r.Method, r.URL.Path)
	}
	fmt.Fprint(w, `{"number": 1}`)
}

func (h *hub) graphQL(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Query     string
		Variables struct {
			IDs   []string
			Input map[string]any
		}
	}
	if !h.knows(w, r) {
		return
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	const repo = `{"id": "R_own", "name": "project", "owner": {"login": "team"}, "hasIssuesEnabled": true, "viewerPermission": "WRITE",
		"mergeCommitAllowed": true, "defaultBranchRef": {"name": "main"}, "parent": null}`
	has := func(text string) bool { return strings.Contains(q.Query, text) }
	switch {
	case has("nodes(ids"):
		nodes := []any{}
		for _, id := range q.Variables.IDs {
			owner := map[string]string{"R_own": "team/project", "R_other": "team/other"}[id]
			nodes = append(nodes, map[string]any{"nameWithOwner": owner})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"data": map[string]any{"nodes": nodes}})
	case has("createPullRequest("):
		h.note("createPullRequest %v", q.Variables.Input["title"])
		fmt.Fprint(w, `{"data": {"createPullRequest": {"pullRequest": {"id": "PR_own", "url": "https://github.com/team/project/pull/7"}}}}`)
	case has("mutation"):
		h.note("%s", q.Query)
	case has("pullRequests("):
		fmt.Fprint(w, `{"data": {"repository": {"pullRequests": {"nodes": []}, "defaultBranchRef": {"name": "main"}}}}`)
	case has("pullRequest("):
		fmt.Fprint(w, `{"data": {"repository": {"pullRequest": {"id": "PR_own", "number": 7, "title": "a change", "state": "OPEN"}}}}`)
	default:
		fmt.Fprint(w, `{"data": {"viewer": {"login": "dev"}, "repository": `+repo+`, "repo_000": `+repo+`}}`)
	}
}

// useGitHub works with the real git and gh on the session's repository, and tries to use the token
// for others.
func useGitHub(t *testing.T, b *box, f *forge, session string) {
	h := f.serveHub()
	other := filepath.Join(f.root, "team/other.git")
	if r := b.Run("git", "clone", "-q", "--bare", filepath.Join(f.root, repository), other); r.Code != 0 {
		t.Fatal(r.All())
	}
	b.Run("git", "-C", other, "config", "http.receivepack", "true")
	b.MustIn(session, "git checkout -qb change && git commit -q --allow-empty -m change && git push -q https://github.com/team/project change && gh config set prompt disabled")
	if got := b.MustIn(session, "gh pr create -R team/project --title 'a change' --body text --base main --head change 2>&1"); !strings.Contains(got, "https://github.com/team/project/pull/7") {
		t.Errorf("gh pr create = %q, want the pull request", got)
	}
	if got := b.MustIn(session, "gh pr view 7 -R team/project"); !strings.Contains(got, "a change") {
		t.Errorf("gh pr view = %q, want its title", got)
	}
	b.MustIn(session, "gh api repos/team/project/issues -f title=one && git ls-remote https://github.com/team/other main && gh api user")
	if got := h.seen(); got != "createPullRequest a change\nPOST /repos/team/project/issues" {
		t.Errorf("changes = %q, want the pull request and the issue", got)
	}
	for _, line := range []string{
		"git push -q https://github.com/team/other change",
		"gh api repos/team/other/issues -f title=x",
		"gh api repos/team/project/keys -f title=x -f key=x",
		"gh api -X DELETE repos/team/project",
		"gh api user/keys -f key=x",
		"echo x | gh gist create -",
		`gh api graphql -f query='mutation { createPullRequest(input: {repositoryId: "R_other", title: "x"}) { clientMutationId } }'`,
		`gh api graphql -f query='mutation { addStar(input: {starrableId: "R_own"}) { clientMutationId } }'`,
	} {
		if r := b.In(session, line); r.Code == 0 || !strings.Contains(r.All(), "403") {
			t.Errorf("%s = exit %d, want a failure with 403\n%s", line, r.Code, r.All())
		}
	}
	if got := h.seen(); got != "" {
		t.Errorf("changes after what is denied = %q, want none", got)
	}
	if got := b.Asz("net", "denied", session); !strings.Contains(got, "POST https://api.github.com/user/keys") || !strings.Contains(got, "no request rule allows it") {
		t.Errorf("net denied = %s, want the request and the reason", got)
	}
	if got := b.Asz("net", "explain", session, "POST", "https://api.github.com/user/keys"); !strings.Contains(got, "denied") || !strings.Contains(got, "no request rule allows it") {
		t.Errorf("net explain = %s, want the denial", got)
	}
	b.Asz("net", "allow", session, "POST https://api.github.com/user/keys")
	b.MustIn(session, "gh api user/keys -f key=x")
	if got := h.seen(); got != "POST /user/keys" {
		t.Errorf("changes after net allow = %q, want the key", got)
	}
	if got := b.MustIn(session, "env"); strings.Contains(got, f.token) || !strings.Contains(got, "GITHUB_TOKEN=ghp_") {
		t.Error("the guest's environment has the token, want its placeholder")
	}

	// The token is removed from the settings, and with it the rules. The running session must not use
	// it any more.
	b.Write(".config/agent-sessionizer/config.yaml", "secrets: {}\n")
	const write = `curl -sS -m 60 -X POST -H "Authorization: token $GITHUB_TOKEN" https://api.github.com/repos/team/other/issues`
	testenv.WaitFor(t, "the changed settings", func() bool { return strings.Contains(b.In(session, write).Stdout, "secrets refresh") })
	if got := h.seen(); got != "" {
		t.Errorf("changes without the token's rules = %q, want none", got)
	}
}
