//go:build escape

package escape

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// sight is something that arrived at a place.
type sight struct {
	place   string // in words, with the address
	token   string // identifies the technique, "" when unknown
	allowed bool   // whether the policy allows it
}

func (s sight) String() string { return fmt.Sprintf("%s (%s)", s.place, s.token) }

// judge collects what arrived. It is asked after each technique, and again at the end
// for what arrived late.
type judge struct {
	canary string // the answer of forbidden places
	keys   keys
	budget budget

	mu      sync.Mutex
	changed chan struct{} // closed at the next sight
	sights  []sight
	spelled map[string]string // tokens by the spelling of an allowed name
}

func newJudge() *judge {
	return &judge{canary: "canary-" + random(), keys: newKeys(), changed: make(chan struct{}), spelled: map[string]string{}}
}

var tokens = regexp.MustCompile(`tk[0-9]{3}[ws][0-9a-f]{8}`)

// saw records that data arrived at a place, which must not get any of the secrets. Each token in
// the data is one sight.
func (j *judge) saw(place string, allowed bool, data string) {
	if found := j.keys.in(data); len(found) > 0 {
		place, allowed = fmt.Sprintf("%s, with the secrets %v", place, found), false
	}
	j.sawTokens(place, allowed, tokens.FindAllString(strings.ToLower(data), -1))
}

func (j *judge) sawTokens(place string, allowed bool, found []string) {
	if len(found) == 0 {
		found = []string{""}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, token := range found {
		if s := (sight{place, token, allowed}); len(j.sights) == 0 || j.sights[len(j.sights)-1] != s {
			j.sights = append(j.sights, s)
		}
	}
	close(j.changed)
	j.changed = make(chan struct{})
}

// mark returns the current position in the list of sights.
func (j *judge) mark() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.sights)
}

// since returns what arrived after a mark, and a channel that announces more.
func (j *judge) since(mark int) ([]sight, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.sights[mark:]), j.changed
}

// reply returns what a place answers.
func (j *judge) reply(place string, allowed bool) string {
	if allowed {
		return "welcome to " + place + "\n"
	}
	return j.canary + " of " + place + "\n"
}

// webAllowed is the world's policy as the judge reads it: what may arrive where.

func webAllowed(addr, host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	switch addr {
	case plan.CDN, plan.CDN2, plan.Wild:
		return plan.IsAllowed(host)
	case plan.Evil: // for a name whose owner points it there
		return host == plan.Owner
	}
	return false
}

// openPorts are the endpoints that allowed names lead to.
var openPorts = map[string][]int{
	plan.CDN:      {80, 443, plan.AltHTTP, plan.AltTLS, 22},
	plan.CDN2:     {80, 443, 22},
	plan.Wild:     {80, 443, 22},
	plan.SSH:      {80, 443, 22},
	plan.DB:       {plan.DBPort},
	plan.Resolver: {53},
}

func endpointAllowed(addr string, port int) bool { return slices.Contains(openPorts[addr], port) }

// issue registers the token of a technique in every form that it takes.
func (j *judge) issue(token string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.spelled[plan.CasedName(token)+"."] = token
}

// cased returns the token that the spelling of an allowed name encodes.
func (j *judge) cased(name string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	if token := j.spelled[name]; token != "" {
		return []string{token}
	}
	return nil
}
