package policy

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxFile   = 1 << 20 // bytes of an allowlist
	maxErrors = 100     // reported individually; the rest is only counted
	maxName   = 253     // bytes of a DNS name in text form
	maxLabel  = 63      // bytes of a DNS label
)

// Parse reads an allowlist: one entry per line in the form that Expand accepts, blank
// lines, and comments from "#" to the end of the line. It reports all errors of the
// file at once, each as "file:line: problem; fix", and then returns no rules. Duplicate
// entries are kept once; a name with different ports is several rules. Without an error
// the result is never nil, so that an empty list can be distinguished from no list.
func Parse(r io.Reader, file string, groups Groups) ([]Rule, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: file is larger than %d bytes; an allowlist is a list of names; use *.zone for many names of one zone", file, maxFile)
	}
	var (
		rules   = []Rule{}
		seen    = map[string]bool{}
		errs    []error
		omitted int
		text    = strings.TrimPrefix(string(data), "\ufeff")
		number  int
	)
	for line := range strings.Lines(text) {
		number++
		line, _, _ = strings.Cut(line, "#")
		line = strings.Trim(line, " \t\r\n")
		if line == "" || seen[line] {
			continue
		}
		found, err := groups.Expand(line, fmt.Sprintf("%s:%d", file, number))
		switch {
		case err != nil && len(errs) >= maxErrors:
			omitted++
		case err != nil:
			errs = append(errs, fmt.Errorf("%s:%d: %w", file, number, err))
		}
		for _, r := range found {
			text := r.String()
			if seen[text] {
				continue
			}
			if len(rules) == MaxRules {
				return nil, fmt.Errorf("%s:%d: more than %d names; use *.zone for many names of one zone", file, number, MaxRules)
			}
			seen[text] = true
			rules = append(rules, r)
		}
		seen[line] = err == nil // a group is long, so it is expanded once
	}
	if omitted > 0 {
		errs = append(errs, fmt.Errorf("%s: %d more lines with errors; is this an allowlist?", file, omitted))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return rules, nil
}

// Groups holds named lists of rules, by name without the "@".
type Groups map[string][]Rule

// Expand returns the rules of one entry. An entry is NAME, *.ZONE for the names below a
// zone, or .ZONE for these and the zone itself, each optionally with :PORT,PORT; or it
// is @GROUP. Groups contain no groups. Errors have the form "problem; fix".
func (g Groups) Expand(entry, source string) ([]Rule, error) {
	name, ok := strings.CutPrefix(entry, "@")
	if !ok {
		entries := []string{entry}
		if zone, whole := strings.CutPrefix(entry, "."); whole {
			entries = []string{zone, "*." + zone}
		}
		var rules []Rule
		for _, e := range entries {
			r, err := ParseRule(e)
			if err != nil {
				return nil, err
			}
			r.Source = source
			rules = append(rules, r)
		}
		return rules, nil
	}
	if len(g) == 0 {
		return nil, fmt.Errorf("%q is a group, but groups are not allowed here; write names", clip(entry))
	}
	group, ok := g[name]
	if !ok {
		return nil, fmt.Errorf("group %q does not exist; the groups are @%s", clip(entry), strings.Join(slices.Sorted(maps.Keys(g)), ", @"))
	}
	rules := slices.Clone(group)
	for i := range rules {
		rules[i].Source = source + " (" + entry + ")"
	}
	return rules, nil
}

// GroupName reports whether name is valid as the name of a group.
func GroupName(name string) bool {
	return name != "" && len(name) <= maxLabel && name[0] != '-' && strings.IndexFunc(name, func(r rune) bool { return r > unicode.MaxASCII || !isLDH(byte(r)) }) < 0
}

// ParseRule parses NAME or NAME:PORT,PORT. The ports in the result are sorted.
func ParseRule(s string) (Rule, error) {
	name, list, found := strings.Cut(s, ":")
	if found && strings.ContainsAny(list, ":/ \t") {
		name, found = s, false // a URL, an address, a path or two names; ParsePattern reports it
	}
	pattern, err := ParsePattern(name)
	if err != nil || !found {
		return Rule{Pattern: pattern}, err
	}
	var ports []uint16
	for text := range strings.SplitSeq(list, ",") {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || text[0] == '0' { // also port 0
			return Rule{}, fmt.Errorf("%q has the invalid port %q; write NAME:PORT or NAME:PORT,PORT with ports from 1 to 65535", clip(s), clip(text))
		}
		ports = append(ports, uint16(port))
	}
	slices.Sort(ports)
	ports = slices.Compact(ports)
	if len(ports) > MaxPorts {
		return Rule{}, fmt.Errorf("%q has %d ports; at most %d are allowed", clip(s), len(ports), MaxPorts)
	}
	return Rule{Pattern: pattern, Ports: ports}, nil
}

// ParsePattern returns the canonical form of a rule's name. Its errors have the form
// "problem; fix".
func ParsePattern(s string) (string, error) {
	if s == "" {
		return "", errors.New("empty name; write a host name such as github.com")
	}
	if !utf8.ValidString(s) {
		return "", fmt.Errorf("%q is not UTF-8; write a host name such as github.com", clip(s))
	}
	for _, r := range s {
		if r > unicode.MaxASCII {
			return "", fmt.Errorf("%q contains the character %q (%U), which may only look like a letter; retype it in ASCII, or write the name's xn-- form if that is intended", clip(s), r, r)
		}
	}
	if err := notAName(s); err != nil {
		return "", err
	}
	name, wildcard := strings.CutPrefix(strings.ToLower(s), "*.")
	if strings.Contains(name, "*") {
		return "", fmt.Errorf("%q has a * that is not the whole first label; write *.zone or list the names", clip(s))
	}
	if wildcard && registryZone(name) {
		return "", fmt.Errorf("%q allows every name of a public registry; list the names, or *.zone of one owner", clip(s))
	}
	if err := hostName(name); err != nil {
		return "", fmt.Errorf("%q %w", clip(s), err)
	}
	if wildcard {
		return "*." + name, nil
	}
	return name, nil
}

// notAName returns an error for common kinds of text that are written in place of a
// name.
func notAName(s string) error {
	if s == "*" || s == "*." {
		return errors.New(`"*" allows every name; use mode: open if that is intended`)
	}
	if strings.Contains(s, "://") {
		return fmt.Errorf("%q is a URL; write only its host name", clip(s))
	}
	if strings.ContainsAny(s, "/?&=\\") {
		if _, err := netip.ParsePrefix(s); err == nil {
			return fmt.Errorf("%q is an address range; list only names, and use a host service for an address on your network", clip(s))
		}
		return fmt.Errorf("%q has a path; write only the host name, because paths cannot be checked", clip(s))
	}
	if strings.ContainsAny(s, " \t") {
		return fmt.Errorf("%q contains a space; write one name per line", clip(s))
	}
	if strings.Contains(s, "@") {
		return fmt.Errorf("%q contains a user name; write only the host name", clip(s))
	}
	bare := strings.Trim(s, "[]")
	_, errAddr := netip.ParseAddr(bare)
	_, errPort := netip.ParseAddrPort(s)
	if errAddr == nil || errPort == nil {
		return fmt.Errorf("%q is an IP address; list only names, and use a host service for an address on your network", clip(s))
	}
	if strings.Contains(s, ":") {
		return fmt.Errorf("%q contains a colon; write NAME or NAME:PORT,PORT", clip(s))
	}
	return nil
}

// hostName checks that a host name has only letters, digits and hyphens.
func hostName(name string) error {
	switch {
	case strings.HasSuffix(name, "."):
		return errors.New("ends in a dot; remove it")
	case strings.HasPrefix(name, "."):
		return errors.New("starts with two dots; write .zone for a zone and the names below it, *.zone for those only")
	case len(name) > maxName:
		return fmt.Errorf("is longer than %d bytes; no such name can exist", maxName)
	case !strings.Contains(name, "."):
		return errors.New("is a single label; write the full name, such as github.com")
	}
	var last string
	for last = range strings.SplitSeq(name, ".") {
		switch {
		case last == "":
			return errors.New("has an empty label; remove the double dot")
		case len(last) > maxLabel:
			return fmt.Errorf("has a label longer than %d bytes; no such name can exist", maxLabel)
		case last[0] == '-' || last[len(last)-1] == '-':
			return errors.New("has a label that starts or ends with a hyphen; remove it")
		}
		for _, c := range []byte(last) {
			if !isLDH(c) {
				return fmt.Errorf("contains the character %q; host names have only letters, digits, hyphens and dots", c)
			}
		}
	}
	if allDigits(last) {
		return errors.New("ends in a number, like an IP address; write a host name")
	}
	return nil
}

// registryZone reports whether anyone can register a name directly below zone:
// top-level domains and the second-level registries of countries. It guards against
// mistakes and does not replace the public suffix list.
func registryZone(zone string) bool {
	second, top, ok := strings.Cut(zone, ".")
	if !ok {
		return true
	}
	if len(top) != 2 {
		return false
	}
	switch second {
	case "co", "com", "net", "org", "gov", "edu", "ac", "or", "ne", "go":
		return true
	}
	return false
}

func isLDH(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-'
}

func allDigits(s string) bool {
	return strings.Trim(s, "0123456789") == ""
}

// clip shortens a quoted text to a readable length.
func clip(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	return s[:limit] + "…"
}
