package gateway

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	maxGraphQL = 1 << 20 // bytes of a request, and of the answer about its objects
	maxKnown   = 1000    // objects whose repository is remembered
)

// checkGraphQL checks the mutations in a GraphQL request, and replaces its body by what was
// checked.
func (w *web) checkGraphQL(r *http.Request, rules []policy.GraphQLRules) error {
	if r.Method != http.MethodPost || r.URL.RawQuery != "" || r.Header.Get("Content-Encoding") != "" {
		return errors.New("a GraphQL request must be a POST without parameters in its URL and without compression")
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxGraphQL+1))
	if err != nil {
		return err
	}
	if len(body) > maxGraphQL {
		return fmt.Errorf("the GraphQL request is longer than %d bytes", maxGraphQL)
	}
	body, mutations, err := intercept.ParseGraphQL(body)
	if err != nil {
		return err
	}
	for _, rule := range rules {
		var ids []string
		for _, m := range mutations {
			field, ok := rule.Mutations[m.Field]
			if !ok {
				return fmt.Errorf("the GraphQL mutation %.60q is not on the allowlist", m.Field)
			}
			id, _ := m.Input[field].(string)
			if id == "" {
				return fmt.Errorf("the GraphQL mutation %s must have the id of an object of %s as %s", m.Field, rule.Repository, field)
			}
			ids = append(ids, id)
		}
		if err := w.ofRepository(r, ids, rule.Repository); err != nil {
			return err
		}
	}
	setBody(r, body)
	return nil
}

func setBody(r *http.Request, body []byte) {
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	r.Header.Set("Content-Length", fmt.Sprint(len(body)))
	r.TransferEncoding, r.Trailer = nil, nil
}

// repositoriesOf asks GitHub for the repositories of objects.
const repositoriesOf = `query($ids: [ID!]!) { nodes(ids: $ids) {
	... on Repository { nameWithOwner }
	... on RepositoryNode { repository { nameWithOwner } }
	... on PullRequestReviewThread { repository { nameWithOwner } }
	... on Ref { repository { nameWithOwner } }
	... on Label { repository { nameWithOwner } } } }`

// ofRepository returns an error unless all objects are of a repository. It asks the host that r
// is for, with the credentials of r.
func (w *web) ofRepository(r *http.Request, ids []string, repository string) error {
	wc := webConnOf(r)
	unknown := slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(ids))), func(id string) bool {
		return w.objects.knows(object{wc.c.name, id, repository})
	})
	if len(unknown) == 0 {
		return nil
	}
	text, err := json.Marshal(map[string]any{"query": repositoriesOf, "variables": map[string]any{"ids": unknown}})
	if err != nil {
		return err
	}
	q, err := http.NewRequestWithContext(withoutValues{r.Context()}, http.MethodPost, wc.scheme()+"://"+wc.authority()+r.URL.EscapedPath(), bytes.NewReader(text))
	if err != nil {
		return err
	}
	for _, name := range []string{"Authorization", "User-Agent"} {
		q.Header[name] = r.Header[name]
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := wc.transport.RoundTrip(q)
	if err != nil {
		return fmt.Errorf("ask for the repository of the mutation's objects: %w", err)
	}
	defer a.Body.Close()
	var answer struct {
		Data struct {
			Nodes []struct {
				NameWithOwner string
				Repository    struct{ NameWithOwner string }
			}
		}
	}
	if err := json.NewDecoder(io.LimitReader(a.Body, maxGraphQL)).Decode(&answer); err != nil || a.StatusCode != http.StatusOK {
		return fmt.Errorf("the host did not say which repository the mutation's objects belong to (status %d)", a.StatusCode)
	}
	for i, id := range unknown {
		of := ""
		if nodes := answer.Data.Nodes; len(nodes) == len(unknown) { // in the order of ids
			of = cmp.Or(nodes[i].NameWithOwner, nodes[i].Repository.NameWithOwner)
		}
		if repository == "" || !strings.EqualFold(of, repository) {
			return fmt.Errorf("the object %.60q is not of %s", id, cmp.Or(repository, "the session's repository"))
		}
		w.objects.add(object{wc.c.name, id, repository})
	}
	return nil
}

// object is an object of a repository. Its id never belongs to another one.
type object struct{ host, id, repository string }

// objects remembers objects whose repository a host confirmed.
type objects struct {
	mu    sync.Mutex
	known map[object]bool
}

func (o *objects) knows(one object) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.known[one]
}

func (o *objects) add(one object) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.known == nil || len(o.known) >= maxKnown {
		o.known = map[object]bool{}
	}
	o.known[one] = true
}
