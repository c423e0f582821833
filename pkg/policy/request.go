package policy

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Bounds of the request rules of a policy.
const (
	MaxRequestRules  = 1000
	maxRequestLayers = 8
	maxRequestPath   = 16 << 10 // bytes
	maxSegments      = 256      // of a path
	maxRequestRule   = 1024     // bytes of one rule
)

// RequestRules says which HTTP requests a host may receive. A rule is "METHODS PATH", such as
// "GET,POST /v1/**" or "* /admin/**". In a path, * stands for any part of a segment, and ** for
// any number of segments. "?name=value" at its end requires that parameter. A rule for GET is
// one for HEAD too. Letters match in both cases.
//
// Except overrides Deny, which overrides Allow. With an Allow rule, the host receives only
// requests that one allows; without any, all that are not denied.
type RequestRules struct {
	Host   string   `json:"host"` // a name or *.ZONE
	Allow  []string `json:"allow,omitempty"`
	Deny   []string `json:"deny,omitempty"`
	Except []string `json:"except,omitempty"`
	Source string   `json:"source,omitempty"`

	GraphQL *GraphQLRules `json:"graphql,omitempty"`
}

// GraphQLRules says which mutations a host's GraphQL endpoint may receive. Queries are not
// limited.
type GraphQLRules struct {
	Path string `json:"path"` // of the endpoint
	// The allowed mutations, each with the field of its input that has the id of an object.
	Mutations  map[string]string `json:"mutations"`
	Repository string            `json:"repository"` // OWNER/REPO, which these objects must belong to
}

// Request is a question about an HTTP request to a name.
type Request struct {
	Host   string
	Method string
	Path   string // as it was sent: percent-encoded
	Query  string // without the question mark
}

// requestRule is a parsed rule.
type requestRule struct {
	text        string
	bad         bool     // it cannot be parsed; Validate refuses it
	methods     []string // nil for all
	path        []string // segments
	name, value string   // of a parameter; "" for none
}

// ParseRequestRule checks the form of a rule of RequestRules.
func ParseRequestRule(text string) error {
	_, err := parseRequestRule(text)
	return err
}

func parseRequestRule(text string) (r requestRule, err error) {
	r.text = text
	methods, path, ok := strings.Cut(text, " ")
	path, query, hasQuery := strings.Cut(strings.TrimSpace(path), "?")
	switch {
	case len(text) > maxRequestRule:
		return r, fmt.Errorf("must have at most %d bytes, got %d", maxRequestRule, len(text))
	case !ok || !strings.HasPrefix(path, "/"):
		return r, fmt.Errorf("must be METHODS PATH, such as GET,POST /v1/**, got %q", clip(text))
	case strings.ContainsAny(path, "%\\") || strings.ContainsFunc(path, isControl):
		return r, fmt.Errorf("must have the path as text, without percent-encoding, got %q", clip(text))
	}
	if methods != "*" {
		for m := range strings.SplitSeq(methods, ",") {
			if m == "" || strings.Trim(m, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" {
				return r, fmt.Errorf("must begin with methods such as GET,POST, or *, got %q", clip(text))
			}
			r.methods = append(r.methods, m)
		}
	}
	r.path = strings.Split(strings.ToLower(path), "/")
	if hasQuery {
		if r.name, r.value, ok = strings.Cut(query, "="); !ok || r.name == "" {
			return r, fmt.Errorf("must have a parameter as name=value after the question mark, got %q", clip(text))
		}
	}
	return r, nil
}

func isControl(c rune) bool { return c < ' ' || c == 0x7f }

// ReadsRequests reports whether a name has request rules, so that the gateway must read what is
// sent to it.
func (p *Policy) ReadsRequests(name string) bool {
	return p != nil && slices.ContainsFunc(p.Requests, func(layer []RequestRules) bool {
		return slices.ContainsFunc(layer, func(r RequestRules) bool { return matchesHost(r.Host, name) })
	})
}

// RequestHosts returns the hosts and zones that have request rules.
func (p *Policy) RequestHosts() []string {
	var all []string
	for _, layer := range p.Requests {
		for _, r := range layer {
			all = append(all, r.Host)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func matchesHost(pattern, name string) bool {
	zone, wild := strings.CutPrefix(pattern, "*")
	return pattern == name || wild && strings.HasSuffix(name, zone)
}

// hostRequests are the parsed rules for one host.
type hostRequests struct {
	*RequestRules
	allow, deny, except []requestRule
}

func parseRequests(layers [][]RequestRules) [][]hostRequests {
	parse := func(texts []string) []requestRule {
		rules := make([]requestRule, len(texts))
		for i, text := range texts {
			r, err := parseRequestRule(text)
			r.bad = err != nil
			rules[i] = r
		}
		return rules
	}
	parsed := make([][]hostRequests, len(layers))
	for i, layer := range layers {
		for j := range layer {
			r := &layer[j]
			parsed[i] = append(parsed[i], hostRequests{r, parse(r.Allow), parse(r.Deny), parse(r.Except)})
		}
	}
	return parsed
}

// DecideRequest answers a question about a request. It decides about the request alone, and not
// whether the name may be reached. Every layer of Requests must allow it.
func (p *Policy) DecideRequest(q Request) Decision {
	if p == nil {
		return Decision{Reason: "no policy"}
	}
	if !p.ReadsRequests(q.Host) {
		return Decision{Allowed: true, Reason: "no request rule for this host"}
	}
	paths, err := readings(q.Path)
	if err != nil {
		return Decision{Reason: err.Error()}
	}
	p.build()
	d := Decision{Allowed: true, Reason: "allowed by a request rule"}
	for _, layer := range p.requests {
		by, ok := decideLayer(layer, q, paths)
		if ok && !by.Allowed {
			return by
		}
		if ok {
			d = by
		}
	}
	return d
}

// decideLayer returns the decision of one layer, if it has rules for the host.
func decideLayer(layer []hostRequests, q Request, paths []string) (d Decision, ok bool) {
	every := func(r requestRule) bool { return r.allowsEvery(q, paths) }
	some := func(r requestRule) bool {
		return slices.ContainsFunc(paths, func(path string) bool { return r.denies(q, path) })
	}
	d = Decision{Allowed: true, Reason: "allowed by a request rule"}
	restricted, allowed := false, Decision{}
	for _, rules := range layer {
		if !matchesHost(rules.Host, q.Host) {
			continue
		}
		ok = true
		if i := slices.IndexFunc(rules.except, every); i >= 0 {
			return Decision{Allowed: true, Rule: rules.except[i].text, Source: rules.Source, Reason: d.Reason}, true
		}
		if i := slices.IndexFunc(rules.deny, some); i >= 0 && d.Allowed {
			d = Decision{Rule: rules.deny[i].text, Source: rules.Source, Reason: "denied by a request rule"}
		}
		restricted = restricted || len(rules.allow) > 0
		if i := slices.IndexFunc(rules.allow, every); i >= 0 && !allowed.Allowed {
			allowed = Decision{Allowed: true, Rule: rules.allow[i].text, Source: rules.Source, Reason: d.Reason}
		}
	}
	switch {
	case !d.Allowed:
	case allowed.Allowed:
		d = allowed
	case restricted:
		d = Decision{Reason: "no request rule allows it"}
	}
	return d, ok
}

// GraphQL returns the rules for the GraphQL operations in a request. It has none for a request
// that Except allows.
func (p *Policy) GraphQL(q Request) (found []GraphQLRules) {
	if p == nil || !p.ReadsRequests(q.Host) {
		return nil
	}
	paths, err := readings(q.Path)
	if err != nil {
		return nil
	}
	p.build()
	for _, layer := range p.requests {
		var here []GraphQLRules
		for _, rules := range layer {
			if !matchesHost(rules.Host, q.Host) {
				continue
			}
			if slices.ContainsFunc(rules.except, func(r requestRule) bool { return r.allowsEvery(q, paths) }) {
				here = nil
				break
			}
			if g := rules.GraphQL; g != nil && slices.Contains(paths, strings.ToLower(g.Path)) {
				here = append(here, *g)
			}
		}
		found = append(found, here...)
	}
	return found
}

var errPath = errors.New("the path can be read in several ways")

// readings returns the texts that a server may take a percent-encoded path for: with an encoded
// slash as a part of a segment, and as a slash. It refuses paths that servers resolve differently.
func readings(escaped string) ([]string, error) {
	if len(escaped) > maxRequestPath || !strings.HasPrefix(escaped, "/") {
		return nil, errors.New("not a path")
	}
	decoded, err := url.PathUnescape(escaped)
	if err != nil || strings.ContainsFunc(decoded, isControl) || strings.ContainsAny(decoded, "\\%") {
		return nil, errPath
	}
	segments := strings.Split(decoded, "/")
	if len(segments) > maxSegments {
		return nil, fmt.Errorf("the path has more than %d segments", maxSegments)
	}
	for i, s := range segments {
		if s == "." || s == ".." || s == "" && i > 0 && i < len(segments)-1 {
			return nil, errPath
		}
	}
	decoded = strings.ToLower(decoded)
	if !strings.Contains(strings.ToLower(escaped), "%2f") {
		return []string{decoded}, nil
	}
	const slash = "\x00" // in no other text
	kept, err := url.PathUnescape(strings.NewReplacer("%2f", slash, "%2F", slash).Replace(escaped))
	if err != nil {
		return nil, errPath
	}
	return []string{decoded, strings.ToLower(kept)}, nil
}

// denies reports whether a rule that denies applies, also to the path without a slash at its end: many
// servers treat both as the same. One that cannot be parsed applies to everything.
func (r requestRule) denies(q Request, path string) bool {
	has := func(values []string, clear bool) bool { return !clear || slices.Contains(values, r.value) }
	return r.bad || r.matches(q, path, has) || r.matches(q, strings.TrimSuffix(path, "/"), has)
}

// allows reports whether a rule that allows applies. One that cannot be parsed applies to
// nothing.
func (r requestRule) allows(q Request, path string) bool {
	return !r.bad && r.matches(q, path, func(values []string, clear bool) bool {
		return clear && len(values) == 1 && values[0] == r.value
	})
}

// allowsEvery reports whether a rule that allows applies to every reading of the path.
func (r requestRule) allowsEvery(q Request, paths []string) bool {
	return !slices.ContainsFunc(paths, func(path string) bool { return !r.allows(q, path) })
}

// matches calls parameter, if the rule names one, with its values, and whether the query can be
// read in one way only.
func (r requestRule) matches(q Request, path string, parameter func(values []string, clear bool) bool) bool {
	method := q.Method
	if method == "HEAD" && !slices.Contains(r.methods, "HEAD") {
		method = "GET"
	}
	if r.methods != nil && !slices.Contains(r.methods, method) {
		return false
	}
	if r.name != "" {
		values, err := url.ParseQuery(q.Query)
		if !parameter(values[r.name], err == nil) {
			return false
		}
	}
	return matchSegments(r.path, strings.Split(path, "/"))
}

// matchSegments compares a pattern with a path. Its time is bounded by the product of their
// lengths.
func matchSegments(pattern, path []string) bool {
	// reach[j] says whether the pattern so far matches the first j segments.
	reach := make([]bool, len(path)+1)
	reach[0] = true
	for _, p := range pattern {
		next := make([]bool, len(path)+1)
		for j := range reach {
			switch {
			case p == "**":
				next[j] = reach[j] || j > 0 && next[j-1]
			case j > 0:
				next[j] = reach[j-1] && matchSegment(p, path[j-1])
			}
		}
		reach = next
	}
	return reach[len(path)]
}

// matchSegment compares a segment with a pattern in which * stands for any text.
func matchSegment(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == text
	}
	first, last := parts[0], parts[len(parts)-1]
	if len(text) < len(first)+len(last) || !strings.HasPrefix(text, first) || !strings.HasSuffix(text, last) {
		return false
	}
	text = text[len(first) : len(text)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(text, part)
		if i < 0 {
			return false
		}
		text = text[i+len(part):]
	}
	return true
}

// validateRequests returns an error if a part of the request rules is invalid.
func (p *Policy) validateRequests() error {
	if len(p.Requests) > maxRequestLayers {
		return fmt.Errorf("%d layers of request rules; at most %d are allowed", len(p.Requests), maxRequestLayers)
	}
	total := 0
	for _, layer := range p.Requests {
		for _, rules := range layer {
			if pattern, err := ParsePattern(rules.Host); err != nil || pattern != rules.Host {
				return fmt.Errorf("request rules for %q: must be the name of a host, or *.ZONE", clip(rules.Host))
			}
			if len(rules.Source) > maxSource {
				return fmt.Errorf("request rules for %s: source has %d bytes; at most %d are allowed", rules.Host, len(rules.Source), maxSource)
			}
			if g := rules.GraphQL; g != nil && (!strings.HasPrefix(g.Path, "/") || len(g.Path) > maxRequestRule || len(g.Mutations) > MaxRequestRules) {
				return fmt.Errorf("request rules for %s: graphql must have a path and at most %d mutations", rules.Host, MaxRequestRules)
			}
			for _, text := range slices.Concat(rules.Allow, rules.Deny, rules.Except) {
				if total++; total > MaxRequestRules {
					return fmt.Errorf("over %d request rules", MaxRequestRules)
				}
				if err := ParseRequestRule(text); err != nil {
					return fmt.Errorf("request rule for %s %w", rules.Host, err)
				}
			}
		}
	}
	return nil
}

// IsRequest reports whether a text is meant as a request: METHOD URL, rather than a name.
func IsRequest(text string) bool { return strings.Contains(text, "://") && strings.Contains(text, " ") }

// ParseRequest parses METHOD URL, such as "POST https://api.github.com/user/repos".
func ParseRequest(text string) (Request, error) {
	method, target, _ := strings.Cut(strings.TrimSpace(text), " ")
	u, err := url.Parse(strings.TrimSpace(target))
	if err != nil || u.Scheme != "https" || u.User != nil || u.Port() != "" && u.Port() != "443" || u.Fragment != "" {
		return Request{}, fmt.Errorf("must be METHOD https://HOST/PATH, got %q", clip(text))
	}
	host, err := Canonical(u.Hostname())
	if err != nil {
		return Request{}, fmt.Errorf("must have the name of a host, got %q", clip(text))
	}
	path := u.EscapedPath()
	if path == "" {
		path = "/"
	}
	return Request{Host: host, Method: strings.ToUpper(method), Path: path, Query: u.RawQuery}, nil
}

// ParseRequestTarget parses METHODS URL, whose path may have the wildcards of a rule, and returns
// the host and the rule. A percent-encoded * is not a wildcard, and is refused.
func ParseRequestTarget(text string) (host, rule string, err error) {
	methods, target, _ := strings.Cut(strings.TrimSpace(text), " ")
	r, err := ParseRequest("GET " + target)
	if err != nil {
		return "", "", err
	}
	path, err := url.PathUnescape(r.Path)
	if err != nil || strings.Count(path, "*") != strings.Count(r.Path, "*") {
		return "", "", fmt.Errorf("must have a path that a rule can contain, got %q", clip(text))
	}
	rule = strings.ToUpper(methods) + " " + path
	if r.Query != "" {
		rule += "?" + r.Query
	}
	return r.Host, rule, ParseRequestRule(rule)
}

// String returns the request as ParseRequestTarget reads it, without its query.
func (q Request) String() string {
	return q.Method + " https://" + q.Host + strings.ReplaceAll(q.Path, "*", "%2A")
}
