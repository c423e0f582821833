package rules

import (
	"slices"
	"strconv"
	"strings"
)

// State is the output of iptables-save --counters for one table.
type State struct {
	policies map[string]string   // built-in chain → policy
	rules    map[string][]string // chain → its rules, in order, without "-A CHAIN"
	packets  map[string]int64    // chain → packets that its rules refused
}

// ParseStates parses the output of iptables-save --counters, by table.
func ParseStates(text string) map[string]State {
	states := map[string]State{}
	for section := range strings.SplitSeq("\n"+text, "\n*") {
		name, rest, ok := strings.Cut(section, "\n")
		if name = strings.TrimSpace(name); ok && name != "" {
			states[name] = ParseState(rest)
		}
	}
	return states
}

// ParseState parses the output of iptables-save --counters for one table.
func ParseState(text string) State {
	s := State{policies: map[string]string{}, rules: map[string][]string{}, packets: map[string]int64{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if chain, ok := strings.CutPrefix(line, ":"); ok {
			fields := strings.Fields(chain)
			if len(fields) >= 2 {
				s.policies[fields[0]] = fields[1]
				s.rules[fields[0]] = nil
			}
			continue
		}
		counter, rule, ok := strings.Cut(line, " ")
		if !ok || !strings.HasPrefix(counter, "[") {
			continue
		}
		rest, ok := strings.CutPrefix(rule, "-A ")
		if !ok {
			continue
		}
		chain, body, _ := strings.Cut(rest, " ")
		s.rules[chain] = append(s.rules[chain], body)
		if refuses(body) {
			packets, _, _ := strings.Cut(strings.TrimPrefix(counter, "["), ":")
			if n, err := strconv.ParseInt(packets, 10, 64); err == nil {
				s.packets[chain] += n
			}
		}
	}
	return s
}

func refuses(rule string) bool {
	return strings.HasSuffix(rule, "-j DROP") || strings.HasSuffix(rule, "-j AGENT-REJECT")
}

// Jumps counts the jumps to our chains. Its result omits chains that do not exist.
func (s State) Jumps(t Table) map[string]int {
	present := map[string]int{}
	for from, to := range t.Jumps {
		if _, ok := s.policies[from]; !ok {
			continue
		}
		present[from] = 0
		for _, rule := range s.rules[from] {
			if rule == "-j "+to {
				present[from]++
			}
		}
	}
	return present
}

// InForce reports whether the table is in force: each jump comes first and exists
// once, the policies drop, and the number of rules is right.
func (s State) InForce(t Table) bool {
	for from, to := range t.Jumps {
		rules := s.rules[from]
		if len(rules) == 0 || rules[0] != "-j "+to || s.Jumps(t)[from] != 1 {
			return false
		}
		if t.Drop && from != "DOCKER-USER" && s.policies[from] != "DROP" {
			return false
		}
	}
	return s.size(t) == len(t.Rules)
}

// SameChains reports whether our chains hold the same rules in both states.
// iptables prints rules in its own spelling, so a state can only be compared with
// another state.
func (s State) SameChains(o State, t Table) bool {
	for _, chain := range t.Chain {
		if !slices.Equal(s.rules[chain], o.rules[chain]) {
			return false
		}
	}
	return true
}

func (s State) size(t Table) int {
	n := 0
	for _, chain := range t.Chain {
		n += len(s.rules[chain])
	}
	return n
}

// Refused returns the number of packets that our chains refused, by chain.
func (s State) Refused(t Table) map[string]int64 {
	refused := map[string]int64{}
	for _, chain := range t.Chain {
		if n, ok := s.packets[chain]; ok {
			refused[chain] = n
		}
	}
	return refused
}
