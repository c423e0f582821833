package intercept

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func body(query string, variables map[string]any) []byte {
	text, _ := json.Marshal(map[string]any{"query": query, "variables": variables})
	return text
}

func TestParseGraphQL(t *testing.T) {
	own := map[string]any{"input": map[string]any{"repositoryId": "R_1", "title": "x"}}
	want := []Mutation{{"createPullRequest", own["input"].(map[string]any)}}
	for name, c := range map[string]struct {
		text []byte
		want []Mutation
	}{
		"query":    {body(`query($owner: String!) { repository(owner: $owner, name: "x") { id } }`, map[string]any{"owner": "a"}), nil},
		"no name":  {body(`{ viewer { login } }`, nil), nil},
		"variable": {body(`mutation M($input: CreatePullRequestInput!) { createPullRequest(input: $input) { pullRequest { id } } }`, own), want},
		"literal":  {body(`mutation { createPullRequest(input: {repositoryId: "R_1", title: """x"""}) { clientMutationId } }`, nil), want},
		"alias":    {body(`mutation { viewer: createPullRequest(input: {repositoryId: "R_1", title: "x"}) { clientMutationId } }`, nil), want},
		"part":     {body(`mutation($id: ID!) { createPullRequest(input: {repositoryId: $id, title: "x"}) { clientMutationId } }`, map[string]any{"id": "R_1"}), want},
		"default":  {body(`mutation($id: ID! = "R_1") { createPullRequest(input: {repositoryId: $id, title: "x"}) { clientMutationId } }`, nil), want},
		"fragment": {body(`mutation { ...a } fragment a on Mutation { ... on Mutation { createPullRequest(input: {repositoryId: "R_1", title: "x"}) { clientMutationId } } }`, nil), want},
		"second":   {body(`query A { viewer { login } } mutation B { createPullRequest(input: {repositoryId: "R_1", title: "x"}) { clientMutationId } }`, nil), want},
		"two keys": {[]byte(`{"query": "{ viewer { login } }", "Query": "mutation { a(input: {}) { b } }"}`), []Mutation{{"a", map[string]any{}}}},
		"no input": {body(`mutation { a { b } }`, nil), []Mutation{{"a", map[string]any{}}}},
	} {
		sent, got, err := ParseGraphQL(c.text)
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("mutations of %s = %v (-want +got):\n%s", name, err, diff)
		}
		again, same, err := ParseGraphQL(sent)
		if diff := cmp.Diff(c.want, same); err != nil || diff != "" || string(again) != string(sent) {
			t.Errorf("mutations of what is sent for %s = %v (-want +got):\n%s\n%s, then %s", name, err, diff, sent, again)
		}
	}
	deep := "mutation { ...f0 }"
	for i := range maxGraphQLNesting + 1 {
		deep += fmt.Sprintf(" fragment f%d on M { ...f%d ...f%d }", i, i+1, i+1)
	}
	for name, text := range map[string][]byte{
		"nothing":       nil,
		"no JSON":       []byte("query"),
		"a list":        []byte(`[{"query": "{ a }"}]`),
		"two":           []byte(`{"query": "{ a }"}{"query": "{ a }"}`),
		"no query":      []byte(`{"extensions": {"persistedQuery": {}}}`),
		"no GraphQL":    body("mutation {", nil),
		"subscription":  body("subscription { a { b } }", nil),
		"missing":       body("mutation { ...f }", nil),
		"a cycle":       body("mutation { ...f } fragment f on M { ...f }", nil),
		"a bomb":        body(deep, nil),
		"many":          body("mutation { "+strings.Repeat("a(input: {}) { b } ", maxMutations+1)+"}", nil),
		"long":          body("{ "+strings.Repeat("a ", maxGraphQLTokens)+"}", nil),
		"a field twice": body(`mutation { a(input: {id: "1", id: "2"}) { b } }`, nil),
	} {
		if _, _, err := ParseGraphQL(text); err == nil {
			t.Errorf("ParseGraphQL of %s = nil, want an error", name)
		}
	}
}

func FuzzParseGraphQL(f *testing.F) {
	f.Add(string(body(`mutation($id: ID! = "R_1") { ...a b(input: {x: [$id, 1, null, {y: E}]}) { c } } fragment a on M { d }`, map[string]any{"id": 1})))
	f.Add(`{"query": "{ a(b: \"\"\"x\"\"\") { c } }", "variables": {"a": [1.5, true]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		sent, found, err := ParseGraphQL([]byte(text))
		if err != nil {
			return
		}
		again, same, err := ParseGraphQL(sent)
		if err != nil || !cmp.Equal(found, same) || string(again) != string(sent) {
			t.Errorf("%s\nis sent as %s\nwith %v, %v,\nthen as %s\nwith %v", text, sent, found, err, again, same)
		}
	})
}
