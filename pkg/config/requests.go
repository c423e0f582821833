package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// Requests says which HTTP requests hosts may receive, by name or *.ZONE.
type Requests map[string]HostRequests

// HostRequests are the rules for one host, as policy.RequestRules has them.
type HostRequests struct {
	Allow []RequestRule `yaml:"allow,omitempty" json:"allow,omitempty"`
	Deny  []RequestRule `yaml:"deny,omitempty" json:"deny,omitempty"`

	GraphQL *GraphQLRules `yaml:"graphql,omitempty" json:"graphql,omitempty"`
}

// GraphQLRules are the rules for a host's GraphQL endpoint, as policy.GraphQLRules has them. The
// repository is the session's.
type GraphQLRules struct {
	Path      string            `yaml:"path" json:"path"`
	Mutations map[string]string `yaml:"mutations" json:"mutations"`
}

// String returns the hosts, for people.
func (r Requests) String() string {
	return "rules for " + strings.Join(slices.Sorted(maps.Keys(r)), ", ")
}

// String returns the number of rules, for people.
func (r HostRequests) String() string {
	return fmt.Sprintf("rules: %d allow, %d deny", len(r.Allow), len(r.Deny))
}

// RequestRule is "METHODS PATH".
type RequestRule string

// Set checks the form of a rule.
func (r *RequestRule) Set(text string) error {
	*r = RequestRule(text)
	return policy.ParseRequestRule(text)
}

func (r Requests) mergeOver(base Requests) Requests {
	if len(r) == 0 {
		return base
	}
	all := Requests{}
	maps.Copy(all, base)
	for host, own := range r {
		all[host] = HostRequests{
			Allow: slices.Concat(all[host].Allow, own.Allow), Deny: slices.Concat(all[host].Deny, own.Deny),
			GraphQL: cmp.Or(own.GraphQL, all[host].GraphQL),
		}
	}
	return all
}

// compile returns the rules as a layer of a policy. In their paths, {owner} and {repo} stand for
// the session's repository; rules with them are left out for hosts that do not belong to it.
func (r Requests) compile(repo RepoKey, source string) []policy.RequestRules {
	var layer []policy.RequestRules
	for _, host := range slices.Sorted(maps.Keys(r)) {
		fill := func(rules []RequestRule) []string {
			texts := []string{} // not nil, so that an Allow without rules that apply allows nothing
			for _, rule := range rules {
				if text, ok := fillIn(string(rule), host, repo); ok {
					texts = append(texts, text)
				}
			}
			return texts
		}
		one := policy.RequestRules{Host: host, Deny: fill(r[host].Deny), Source: source}
		if len(r[host].Allow) > 0 {
			if one.Allow = fill(r[host].Allow); len(one.Allow) == 0 {
				one.Deny = append(one.Deny, "* /**")
			}
		}
		if g := r[host].GraphQL; g != nil {
			of, _ := fillIn("{owner}/{repo}", host, repo)
			one.GraphQL = &policy.GraphQLRules{Path: g.Path, Mutations: g.Mutations, Repository: of}
		}
		layer = append(layer, one)
	}
	return layer
}

func fillIn(rule, host string, repo RepoKey) (text string, ok bool) {
	if !strings.Contains(rule, "{owner}") && !strings.Contains(rule, "{repo}") {
		return rule, true
	}
	forge, path, _ := strings.Cut(string(repo), "/")
	owner, name, _ := strings.Cut(path, "/")
	if owner == "" || name == "" || strings.ContainsAny(name, "/*?%") || strings.ContainsAny(owner, "*?%") || !strings.HasSuffix("."+host, "."+forge) {
		return "", false
	}
	return strings.NewReplacer("{owner}", owner, "{repo}", name).Replace(rule), true
}

// requestLayers returns the request rules of the settings and of the secrets that are bound.
func (c *Config) requestLayers(s Settings) (layers [][]policy.RequestRules, err error) {
	if len(s.Network.HTTP) > 0 {
		layers = append(layers, s.Network.HTTP.compile(s.Repo, "network.http"))
	}
	used := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(s.Secrets)) {
		one, err := c.Bound(name, s.Secrets[name])
		if err != nil || one.Guest {
			continue // an error is reported where secrets are checked
		}
		for _, set := range one.Rules {
			rules, ok := c.requestRules[set]
			if !ok {
				return nil, fail.New(fail.Usage, "secret %s has the request rules %q, which do not exist; defined: %s", name, set,
					strings.Join(slices.Sorted(maps.Keys(c.requestRules)), ", ")).WithHint("agent-sessionizer config edit config.yaml")
			}
			if !used[set] {
				layers = append(layers, rules.compile(s.Repo, fmt.Sprintf("request_rules.%s", set)))
			}
			used[set] = true
		}
	}
	return layers, nil
}
