package gateway

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// github is a GraphQL endpoint with objects of two repositories. It counts the questions about
// them.
type github struct {
	t     *testing.T
	asked atomic.Int64
	got   atomic.Pointer[string] // the last other request
}

func (g *github) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		g.t.Error(err)
	}
	if r.Header.Get("Authorization") != "Bearer "+realToken {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	var q struct {
		Query     string
		Variables struct{ IDs []string }
	}
	if err := json.Unmarshal(body, &q); err != nil || !strings.Contains(q.Query, "nodes(ids") {
		text := string(body)
		g.got.Store(&text)
		fmt.Fprint(w, `{"data": {}}`)
		return
	}
	g.asked.Add(1)
	var nodes []any
	for _, id := range q.Variables.IDs {
		switch id {
		case "R_own":
			nodes = append(nodes, map[string]any{"nameWithOwner": "Acme/App"})
		case "PR_own":
			nodes = append(nodes, map[string]any{"repository": map[string]any{"nameWithOwner": "acme/app"}})
		case "R_other":
			nodes = append(nodes, map[string]any{"nameWithOwner": "acme/other"})
		case "cut":
			continue
		default:
			nodes = append(nodes, nil)
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"data": map[string]any{"nodes": nodes}})
}

func TestGraphQL(t *testing.T) {
	p := allow("example.com")
	p.Requests = [][]policy.RequestRules{{{Host: "example.com", Allow: []string{"POST /graphql", "GET /**"}, GraphQL: &policy.GraphQLRules{
		Path: "/graphql", Repository: "acme/app",
		Mutations: map[string]string{"createPullRequest": "repositoryId", "addComment": "subjectId"},
	}}}}
	w := newWorld(t, config{policy: p})
	hub := &github{t: t}
	w.trusting(w.secureWeb("example.com", 443, hub))
	c, guestToken := w.bind(true)
	query := ""
	send := func(method, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(w.ctx(), method, "https://example.com/graphql"+query, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+guestToken)
		status, answer, err := do(c, r)
		if err != nil {
			t.Fatal(err)
		}
		return status, answer
	}
	mutation := func(field, argument, id string) string {
		text, _ := json.Marshal(map[string]any{
			"query":     fmt.Sprintf("mutation($input: I!) { %s(input: $input) { clientMutationId } }", field),
			"variables": map[string]any{"input": map[string]string{argument: id}},
		})
		return string(text)
	}
	for range 2 { // the second time, the objects are known
		for _, body := range []string{
			`{"query": "{ viewer { login } }"}`,
			mutation("createPullRequest", "repositoryId", "R_own"),
			mutation("addComment", "subjectId", "PR_own"),
		} {
			if status, answer := send(http.MethodPost, body); status != http.StatusOK {
				t.Errorf("%s = %d %s, want %d", body, status, answer, http.StatusOK)
			}
		}
	}
	if n := hub.asked.Load(); n != 2 {
		t.Errorf("questions about objects = %d, want 2", n)
	}
	if got := hub.got.Load(); got == nil || !strings.Contains(*got, `"PR_own"`) {
		t.Errorf("the host got %v, want the mutation", got)
	}
	hub.got.Store(nil)
	for body, want := range map[string]string{
		mutation("createPullRequest", "repositoryId", "R_other"):   `the object "R_other" is not of acme/app`,
		mutation("createPullRequest", "repositoryId", "R_none"):    "is not of acme/app",
		mutation("createPullRequest", "repositoryId", "cut"):       "is not of acme/app",
		mutation("createPullRequest", "repositoryId", ""):          "must have the id of an object of acme/app as repositoryId",
		mutation("createPullRequest", "headRepositoryId", "R_own"): "as repositoryId",
		mutation("addPublicKey", "repositoryId", "R_own"):          `the GraphQL mutation "addPublicKey" is not on the allowlist`,
		"{": "must be one GraphQL request",
		`{"query": "` + strings.Repeat("#", maxGraphQL) + `"}`: "is longer than",
	} {
		status, answer := send(http.MethodPost, body)
		if status != http.StatusForbidden || !strings.Contains(answer, want) {
			t.Errorf("%.100s = %d %s, want %d, %q", body, status, answer, http.StatusForbidden, want)
		}
	}
	if status, answer := send(http.MethodGet, ""); status != http.StatusForbidden {
		t.Errorf("GET = %d %s, want %d", status, answer, http.StatusForbidden)
	}
	query = "?query=" + url.QueryEscape("mutation { a { b } }") // which a server may prefer
	if status, answer := send(http.MethodPost, `{"query": "{ viewer { login } }"}`); status != http.StatusForbidden {
		t.Errorf("POST with a query in its URL = %d %s, want %d", status, answer, http.StatusForbidden)
	}
	if got := hub.got.Load(); got != nil {
		t.Errorf("the host got %s, want nothing that was refused", *got)
	}
	w.wait("a denied request", func(r Record) bool { return strings.Contains(r.Request, "POST https://example.com/graphql") })
}
